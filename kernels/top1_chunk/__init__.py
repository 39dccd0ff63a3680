"""Top-1 Chunk attention: each query attends to its own chunk and its best earlier chunks."""

from kernels.top1_chunk.choice import Best, best_by_keys, best_by_mean, mean_keys, merge
from kernels.top1_chunk.interface import top1_chunk_attention

__all__ = ["Best", "best_by_keys", "best_by_mean", "mean_keys", "merge", "top1_chunk_attention"]
