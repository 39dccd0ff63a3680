"""Checkpoints: contents, file format, saving and loading."""
