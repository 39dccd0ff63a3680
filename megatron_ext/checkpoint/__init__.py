"""Checkpoints: what they hold, how they lie on disk, how they are saved and loaded."""
