"""Benchmarks of `selectron bench`: layers, training steps, checkpoints, optimizers, data loading and preparation."""
