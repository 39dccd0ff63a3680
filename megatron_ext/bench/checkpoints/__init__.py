"""Benchmark of checkpoints."""
