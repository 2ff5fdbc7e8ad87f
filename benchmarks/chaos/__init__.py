"""`make chaos`: what goes wrong, by noun, and an audit of what became of every job."""
