"""Benchmark of whole training steps."""
