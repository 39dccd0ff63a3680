"""Sequence mixers: one file per family, registered by name (`registry`)."""
