"""MoBA: each query attends to its own block and those with the best mean keys (Lu et al. 2025, arXiv 2502.13189)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron_ext.config.schema import STRICT, PowerOfTwo
from megatron_ext.mixers.registry import register
from megatron_ext.mixers.top1_chunk import Top1Chunk, Top1ChunkConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MoBAConfig:
    """MoBA.

    Attributes:
        block_size: keys a block, a power of two; the GPU kernels take 32 to 512.
        top_k: blocks that each query attends to, its own included: 2 to 17.
        position_encoding: rotary or none.
    """

    block_size: PowerOfTwo = 512
    top_k: Annotated[int, Field(ge=2, le=17)] = 3
    position_encoding: Literal["rope", "none"] = "rope"


@register("moba", MoBAConfig)
class MoBA(Top1Chunk):
    """Mixture of block attention with grouped queries.

    That is chunk selection by the mean key, with the own chunk, in one softmax.
    """

    chunk_field: ClassVar[str] = "block_size"

    mixer_config: MoBAConfig

    @property
    def selection(self) -> Top1ChunkConfig:
        """See `Top1Chunk.selection`; its `top_k` does not count the own chunk."""
        own = self.mixer_config
        return Top1ChunkConfig(chunk_size=own.block_size, top_k=own.top_k - 1, score="approx")
