"""Native Sparse Attention (NSA)."""

from kernels.native_sparse_attention.interface import native_sparse_attention

__all__ = ["native_sparse_attention"]
