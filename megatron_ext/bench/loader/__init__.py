"""Benchmark of data loading."""
