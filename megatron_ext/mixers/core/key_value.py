"""Base class of softmax attention and the sparse mixers: grouped queries, keys, values, rotary positions."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.common.fusion import cut
from megatron_ext.config.traits import MixerTraits
from megatron_ext.mixers.core.base import Mixer, MixInput, batch_first
from megatron_ext.mixers.core.rotary import rotated_heads, rotation
from megatron_ext.parallel.exchange import gather_sequence
from megatron_ext.parallel.zigzag import from_zigzag, to_zigzag, zigzag_pieces


def keys_in_window(window: int | None, seq_length: int) -> float:
    """Return the mean number of keys that a query sees in a causal window, including the key of its own position.

    Args:
        window: maximum number of keys per query, including the query's own position; None: no limit.
        seq_length: number of positions in the sequence.
    """
    window = min(window or seq_length, seq_length)
    return window - window * (window - 1) / (2 * seq_length)


class KeyValueMixer(Mixer):
    """Mixer whose head group is a query group: the queries that share one key and value head.

    Features of the input projection, per group: [queries | key | value]. A subclass implements `attend`.
    """

    traits: ClassVar[MixerTraits] = MixerTraits(
        supports_kv_gather=True, head_groups_are_query_groups=True, supports_document_masking=True
    )

    moves_queries: ClassVar[bool] = True
    """True if ranks that gather keys and values may exchange queries to balance the causal load (`zigzag`)."""

    @property
    def projects_keys(self) -> bool:
        """True if the input projection yields keys."""
        return True

    @property
    def window(self) -> int | None:
        """Maximum number of keys that a query sees, including the query's own position; None: no limit."""
        return None

    @property
    def queries_per_group(self) -> int:
        """Number of query heads that share a key and value head (GQA)."""
        return self.config.num_attention_heads // self.config.num_query_groups

    def num_head_groups(self) -> int:
        """Return the number of query groups."""
        return self.config.num_query_groups

    def head_group_width(self) -> int:
        """Return the width of the group's queries, its key (if projected) and its value together."""
        return (self.queries_per_group + self.projects_keys + 1) * self.head_dim

    def output_width(self) -> int:
        """Return the width of the outputs of all queries of a group."""
        return self.queries_per_group * self.head_dim

    def frozen_keys(self, v_bshd: Tensor, first_position: int, part: MixInput) -> Tensor:
        """Return keys [b, s, groups, d] of positions from `first_position` on, for a mixer that projects no keys."""
        raise AssertionError(f"{type(self).__name__} projects its keys")

    @abstractmethod
    def attend(self, q_bthd: Tensor, k_bshd: Tensor, v_bshd: Tensor, query_offset: int, part: MixInput) -> Tensor:
        """Attend with queries to the keys up to the last query; return outputs [b, t, hq, d].

        Args:
            q_bthd: queries of the groups of `part`, group by group.
            k_bshd: keys, one head per group.
            v_bshd: values, one head per group.
            query_offset: index of the first query among the keys, s - t.
            part: groups and positions of the queries.
        """

    def mix(self, x_tbuw: Tensor, part: MixInput) -> Tensor:
        """Implement `Mixer.mix`: split the rows into heads, rotate, attend."""
        t, b, u, _ = x_tbuw.shape
        o_bthd = self.attend_to_history(*self._heads(x_tbuw, part), part)
        return batch_first(o_bthd).reshape(t, b, u, self.output_width())

    def _heads(self, x_tbuw: Tensor, part: MixInput) -> tuple[Tensor, Tensor | None, Tensor]:
        """Split rows into queries [b, t, hq, d], keys (None if not projected) and values [t, b, groups, d]."""
        widths = [self.queries_per_group * self.head_dim, *([self.head_dim] * (self.projects_keys + 1))]
        if self.mixer_config.position_encoding == "rope" and self.projects_keys:
            rotary = rotation(part.first_position, len(x_tbuw), self.head_dim, self.config.rotary_base, x_tbuw.device)
            q_bthd, k_btgd, v_btgd = rotated_heads(x_tbuw, rotary, widths)
            return q_bthd, batch_first(k_btgd), batch_first(v_btgd)
        q_tbuw, *keys, v_tbgd = cut(x_tbuw, widths)
        q_tbhd = q_tbuw.unflatten(-1, (-1, self.head_dim)).flatten(2, 3)
        return batch_first(q_tbhd), keys[0] if keys else None, v_tbgd

    def attend_to_history(self, q_bthd: Tensor, k_tbgd: Tensor | None, v_tbgd: Tensor, part: MixInput) -> Tensor:
        """Attend to all visible keys and values, at the same and earlier positions. Return outputs [b, t, hq, d].

        Args:
            q_bthd: queries, as in `attend`.
            k_tbgd: keys of the queries' positions, one head per group; None: the mixer projects no keys.
            v_tbgd: values of the queries' positions, one head per group.
            part: as in `attend`.
        """
        if part.history.ranks is not None and self.moves_queries and self.window is None and len(v_tbgd) % 2 == 0:
            return self._attend_zigzag(q_bthd, k_tbgd, v_tbgd, part, part.history.ranks)
        v_bshd = batch_first(part.history.prefix_rows("values", v_tbgd, self.window))
        query_offset = v_bshd.shape[1] - len(v_tbgd)
        if k_tbgd is None:
            k_bshd = self.frozen_keys(v_bshd, part.first_position - query_offset, part)
        else:
            k_bshd = batch_first(part.history.prefix_rows("keys", k_tbgd, self.window))
        return self.attend(q_bthd, k_bshd, v_bshd, query_offset, part)

    def _attend_zigzag(
        self, q_bthd: Tensor, k_tbgd: Tensor | None, v_tbgd: Tensor, part: MixInput, ranks: ProcessGroup
    ) -> Tensor:
        """Implement `attend_to_history` with gathered keys and values, for an early and a late piece of the queries.

        Each rank exchanges half of its queries, so that all ranks have the same causal load.
        """
        v_bshd = batch_first(gather_sequence(v_tbgd, ranks))
        k_bshd = self.frozen_keys(v_bshd, 0, part) if k_tbgd is None else batch_first(gather_sequence(k_tbgd, ranks))
        pieces = batch_first(to_zigzag(batch_first(q_bthd), ranks)).chunk(2, 1)
        length, outputs = pieces[0].shape[1], []
        for piece, q_piece in zip(zigzag_pieces(ranks), pieces, strict=True):
            num_visible = (piece + 1) * length
            outputs.append(self.attend(q_piece, k_bshd[:, :num_visible], v_bshd[:, :num_visible], piece * length, part))
        return batch_first(from_zigzag(batch_first(torch.cat(outputs, 1)), ranks))
