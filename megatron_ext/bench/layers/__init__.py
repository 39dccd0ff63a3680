"""Benchmark of single layers beside their peers."""
