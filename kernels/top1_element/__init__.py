"""Top-1 Element attention: each query takes the value of its best key."""

from kernels.top1_element.interface import top1_element_attention

__all__ = ["top1_element_attention"]
