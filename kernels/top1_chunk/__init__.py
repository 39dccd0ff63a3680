"""Top-1 Chunk selection."""

from kernels.top1_chunk.interface import top1_chunk_attention

__all__ = ["top1_chunk_attention"]
