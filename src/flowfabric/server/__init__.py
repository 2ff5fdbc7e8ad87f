"""The HTTP server: the engine's operations for programs in any language."""
