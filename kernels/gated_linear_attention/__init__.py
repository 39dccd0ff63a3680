"""Linear attention without decay, or with a decay per head, per token and head, or per token, head and key feature."""

from kernels.gated_linear_attention.interface import gated_linear_attention

__all__ = ["gated_linear_attention"]
