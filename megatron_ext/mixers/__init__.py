"""Sequence mixers: one file a family, known by name through the registry."""
