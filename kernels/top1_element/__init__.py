"""Top-1 Element selection."""

from kernels.top1_element.interface import top1_element_attention

__all__ = ["top1_element_attention"]
