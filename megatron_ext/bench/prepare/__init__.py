"""Benchmark of data preparation."""
