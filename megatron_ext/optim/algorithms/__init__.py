"""Optimizer algorithms, a file each."""
