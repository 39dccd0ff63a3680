"""Short causal depthwise convolution with SiLU. Its output is split into parts; some may be normalised."""

from kernels.short_convolution.interface import short_convolution

__all__ = ["short_convolution"]
