"""Base classes, registry and shared parts of the loggers."""
