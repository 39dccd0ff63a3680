"""Helpers of every package: user errors, files, temporary folders, signals and text."""
