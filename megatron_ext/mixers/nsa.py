"""Native Sparse Attention: compressed blocks, selected blocks and a window, gated (arXiv 2502.11089)."""

from __future__ import annotations

from dataclasses import dataclass as plain_dataclass
from typing import ClassVar

from torch import Tensor

from kernels.common.fusion import cut
from kernels.native_sparse_attention import native_sparse_attention
from megatron_ext.mixers.core.base import MixInput, batch_first
from megatron_ext.mixers.core.key_value import KeyValueMixer, keys_in_window
from megatron_ext.mixers.core.registry import register
from megatron_ext.mixers.core.settings import NUM_BRANCHES, NSAConfig


@plain_dataclass(frozen=True, kw_only=True)
class GatedMixInput(MixInput):
    """`MixInput` with the gates of its queries.

    Attributes:
        gates_bthx: gates [b, t, hq, branches], fp32, in (0, 1).
    """

    gates_bthx: Tensor


@register("nsa")
class NSA(KeyValueMixer):
    """Native Sparse Attention with grouped queries; the queries of a group share their selection.

    Rows of the input projection, per group: [queries | key | value | gates]. Each query head has three gates:
    compressed, selected, window.
    """

    moves_queries: ClassVar[bool] = False  # the gates are not exchanged
    mixer_config: NSAConfig

    def head_group_width(self) -> int:
        """Return the width of the group's queries, key, value and gates together."""
        return super().head_group_width() + self._num_gates

    @property
    def _num_gates(self) -> int:
        """Number of gates of a group."""
        return NUM_BRANCHES * self.queries_per_group

    def mix(self, x_tbuw: Tensor, part: MixInput) -> Tensor:
        """Implement `Mixer.mix`: split off the gates, and process the other rows as `KeyValueMixer` does."""
        t, b, u, _ = x_tbuw.shape
        rows, gates = cut(x_tbuw, [super().head_group_width(), self._num_gates])
        gates_tbhx = gates.float().sigmoid().reshape(t, b, u * self.queries_per_group, NUM_BRANCHES)
        return super().mix(rows, GatedMixInput(**vars(part), gates_bthx=batch_first(gates_tbhx)))

    def attend(self, q_bthd: Tensor, k_bshd: Tensor, v_bshd: Tensor, query_offset: int, part: MixInput) -> Tensor:
        """Implement `KeyValueMixer.attend`."""
        assert isinstance(part, GatedMixInput), "`mix` adds the gates"
        settings = self.mixer_config
        return native_sparse_attention(
            q_bthd,
            k_bshd,
            v_bshd,
            part.gates_bthx,
            block_size=settings.block_size,
            num_selected=settings.num_selected,
            window=settings.window,
            query_offset=query_offset,
        )

    def mixing_flops(self, seq_length: int) -> float:
        """Count scores and weighted values of the three branches. Selected blocks count in full, also the query's."""
        settings = self.mixer_config
        compressed = seq_length / settings.block_size / 2
        selected = min(settings.num_selected * settings.block_size, seq_length / 2)
        num_visible = compressed + selected + keys_in_window(settings.window, seq_length)
        return 4 * self.config.num_attention_heads * self.head_dim * num_visible
