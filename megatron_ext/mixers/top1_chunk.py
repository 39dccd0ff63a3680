"""Top-1 Chunk: each query attends to its own chunk and the best-scoring earlier chunks (arXiv 2505.18522)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from kernels.top1_chunk import top1_chunk_attention
from megatron_ext.config.traits import MixerTraits
from megatron_ext.mixers.core.base import MixInput, batch_first
from megatron_ext.mixers.core.chunk_fetch import choose_over_ranks, fetch_chosen
from megatron_ext.mixers.core.key_value import KeyValueMixer
from megatron_ext.mixers.core.registry import register
from megatron_ext.mixers.core.settings import Top1ChunkConfig
from megatron_ext.utils.errors import UserError


@register("top1_chunk")
class Top1Chunk(KeyValueMixer):
    """Top-1 Chunk attention with grouped queries."""

    traits: ClassVar[MixerTraits] = replace(KeyValueMixer.traits, chunk_field="chunk_size")

    @property
    def selection(self) -> Top1ChunkConfig:
        """Settings of the selection."""
        return self.mixer_config

    def sharded_bytes(self, num_positions: int) -> float | None:
        """Implement `Mixer.sharded_bytes`: an upper bound, all keys and values and the inputs of the choice.

        The choice itself is not known beforehand. The bound is identical on all ranks.
        """
        settings = self.selection
        if num_positions % settings.chunk_size:
            return None
        scored = 1 / settings.chunk_size if settings.score == "approx" else 1
        return num_positions * self.head_dim * (2 + scored) * self.config.params_dtype.itemsize

    def attend_to_history(self, q_bthd: Tensor, k_tbgd: Tensor | None, v_tbgd: Tensor, part: MixInput) -> Tensor:
        """Implement `KeyValueMixer.attend_to_history`: fetch from other ranks only the chunks that are chosen here."""
        settings, group = self.selection, part.history.ranks
        gathers_all = self.config.context_exchange == "heads" or len(v_tbgd) % settings.chunk_size
        if group is None or gathers_all:
            return super().attend_to_history(q_bthd, k_tbgd, v_tbgd, part)
        if v_tbgd.is_meta:
            problem = f"{self.config.context_exchange}, but the fetched chunks depend on the data and cannot be planned"
            raise UserError("parallel.context_exchange", problem, "plan with parallel.context_exchange=heads")
        assert k_tbgd is not None
        k, v = batch_first(k_tbgd), batch_first(v_tbgd)
        options: dict[str, Any] = {"chunk_size": settings.chunk_size, "top_k": settings.top_k, "score": settings.score}
        choice = choose_over_ranks(q_bthd, k, **options, group=group)
        k, v, choice = fetch_chosen(k, v, choice, chunk_size=settings.chunk_size, group=group)
        return self._attend(q_bthd, k, v, k.shape[1] - q_bthd.shape[1], choice)

    def attend(self, q_bthd: Tensor, k_bshd: Tensor, v_bshd: Tensor, query_offset: int, part: MixInput) -> Tensor:
        """Implement `KeyValueMixer.attend`."""
        return self._attend(q_bthd, k_bshd, v_bshd, query_offset)

    def _attend(
        self, q_bthd: Tensor, k_bshd: Tensor, v_bshd: Tensor, query_offset: int, selection: Tensor | None = None
    ) -> Tensor:
        settings = self.selection
        out, _ = top1_chunk_attention(
            q_bthd,
            k_bshd,
            v_bshd,
            chunk_size=settings.chunk_size,
            top_k=settings.top_k,
            score=settings.score,
            local=settings.local,
            query_offset=query_offset,
            selection=selection,
        )
        return out

    def mixing_flops(self, seq_length: int) -> float:
        """Count attention to the query's own chunk and the chosen ones, and the scores of the choice."""
        settings = self.selection
        c, num_earlier = settings.chunk_size, max(seq_length - settings.chunk_size, 0) / 2
        scored = num_earlier / c if settings.score == "approx" else num_earlier
        attended = min(settings.top_k * c, num_earlier) + (c / 2 if settings.local else 0)
        return self.config.num_attention_heads * self.head_dim * (4 * attended + 2 * scored)
