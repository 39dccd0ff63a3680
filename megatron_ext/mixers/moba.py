"""MoBA: attention to the query's own block and those with the best mean keys (Lu et al. 2025, arXiv 2502.13189)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from megatron_ext.config.traits import MixerTraits
from megatron_ext.mixers.core.registry import register
from megatron_ext.mixers.core.settings import MoBAConfig, Top1ChunkConfig
from megatron_ext.mixers.top1_chunk import Top1Chunk


@register("moba")
class MoBA(Top1Chunk):
    """Mixture of block attention with grouped queries.

    Equals Top-1 Chunk with the `approx` score and the query's own chunk, in one softmax.
    """

    traits: ClassVar[MixerTraits] = replace(Top1Chunk.traits, chunk_field="block_size")

    mixer_config: MoBAConfig

    @property
    def selection(self) -> Top1ChunkConfig:
        """Settings of the equivalent Top-1 Chunk, whose `top_k` does not count the query's own chunk."""
        own = self.mixer_config
        return Top1ChunkConfig(chunk_size=own.block_size, top_k=own.top_k - 1, score="approx")
