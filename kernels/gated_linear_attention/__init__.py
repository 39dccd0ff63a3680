"""Linear attention, plain or with a decay: of a head, of a head and token, of a head, token and key feature."""

from kernels.gated_linear_attention.interface import gated_linear_attention

__all__ = ["gated_linear_attention"]
