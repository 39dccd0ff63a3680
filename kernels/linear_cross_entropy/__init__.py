"""Cross entropy of a language model's output layer that never materialises all logits."""

from kernels.linear_cross_entropy.interface import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
