"""The operations: load and lock rows, let the core decide, save what it decided."""
