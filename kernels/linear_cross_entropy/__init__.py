"""The cross entropy of a language model's output layer, whose logits are never all in memory."""

from kernels.linear_cross_entropy.interface import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
