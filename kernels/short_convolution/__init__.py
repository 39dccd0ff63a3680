"""The short causal convolution over features, with its SiLU, cut into parts of which some are given unit length."""

from kernels.short_convolution.interface import short_convolution

__all__ = ["short_convolution"]
