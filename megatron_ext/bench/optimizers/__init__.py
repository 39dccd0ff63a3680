"""Benchmark of optimizers."""
