"""Base classes and shared parts of the mixers."""
