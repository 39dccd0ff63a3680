"""The selective scan: a state a channel whose step, input and output are of each token's choice (Mamba-1)."""

from kernels.selective_scan.interface import selective_scan

__all__ = ["selective_scan"]
