"""Causal softmax attention."""

from kernels.softmax_attention.alibi import alibi_slopes
from kernels.softmax_attention.interface import softmax_attention

__all__ = ["alibi_slopes", "softmax_attention"]
