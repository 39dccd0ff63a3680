"""Formats of input files, a module each, which registers a reader."""
