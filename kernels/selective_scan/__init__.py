"""Selective scan of Mamba-1: a diagonal state per channel with input-dependent step size, B and C."""

from kernels.selective_scan.interface import selective_scan

__all__ = ["selective_scan"]
