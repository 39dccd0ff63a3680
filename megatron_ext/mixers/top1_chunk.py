"""Top-1 Chunk: each query attends to its own chunk and the best-scoring earlier ones (arXiv 2505.18522)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from kernels.top1_chunk import top1_chunk_attention
from megatron_ext.config.schema import STRICT, PowerOfTwo
from megatron_ext.mixers.base import Part
from megatron_ext.mixers.key_value import KeyValueMixer
from megatron_ext.mixers.registry import register


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Top1ChunkConfig:
    """Top-1 Chunk.

    Attributes:
        chunk_size: keys a chunk, a power of two; the GPU kernels take 32 to 512.
        top_k: complete earlier chunks each query chooses, at most 16.
        score: of a chunk: the query with its mean key (`approx`), the best of its keys (`exact`), or the logarithm of
            the sum of exponentials over its keys (`exact_lse`).
        local: whether the query's own chunk, up to the query, takes part.
        position_encoding: rotary or none.
    """

    chunk_size: PowerOfTwo = 128
    top_k: Annotated[int, Field(ge=1, le=16)] = 1
    score: Literal["approx", "exact", "exact_lse"] = "exact"
    local: bool = True
    position_encoding: Literal["rope", "none"] = "rope"


@register("top1_chunk", Top1ChunkConfig)
class Top1Chunk(KeyValueMixer):
    """Top-1 Chunk attention with grouped queries."""

    @property
    def selection(self) -> Top1ChunkConfig:
        """What is chosen, and how."""
        return self.mixer_config

    def attend(self, q_bthd: Tensor, k_bshd: Tensor, v_bshd: Tensor, query_offset: int, part: Part) -> Tensor:
        """See `KeyValueMixer.attend`."""
        chosen = self.selection
        return top1_chunk_attention(
            q_bthd,
            k_bshd,
            v_bshd,
            chunk_size=chosen.chunk_size,
            top_k=chosen.top_k,
            score=chosen.score,
            local=chosen.local,
            query_offset=query_offset,
        )

    def mixing_flops(self, seq_length: int) -> float:
        """Attention to the own and the chosen chunks, and the scores that the choice needs."""
        chosen = self.selection
        c, before = chosen.chunk_size, max(seq_length - chosen.chunk_size, 0) / 2
        scored = before / c if chosen.score == "approx" else before
        attended = min(chosen.top_k * c, before) + (c / 2 if chosen.local else 0)
        return self.config.num_attention_heads * self.head_dim * (4 * attended + 2 * scored)
