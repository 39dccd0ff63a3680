"""Benchmark of the attention kernels against other implementations, with checks: `selectron bench kernels`."""
