"""What softmax attention and the Top-1 mixers share: queries in groups, keys, values, rotary positions."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.fusion import cut
from megatron_ext.mixers.base import Mixer, Part, batch_first
from megatron_ext.mixers.rotary import rotated_heads, rotation
from megatron_ext.parallel.exchange import gather_sequence
from megatron_ext.parallel.zigzag import from_zigzag, to_zigzag, zigzag_pieces


def keys_in_window(window: int | None, seq_length: int) -> float:
    """Keys that a query sees on average in a causal window, its own included; None: all up to it."""
    window = min(window or seq_length, seq_length)
    return window - window * (window - 1) / (2 * seq_length)


class KeyValueMixer(Mixer):
    """A mixer whose unit is a query group: the queries that share one key and value head.

    Rows of the input projection, per group: [queries | key | value]. A subclass writes `attend`.
    """

    gathers_keys_and_values: ClassVar[bool] = True
    units_are_groups: ClassVar[bool] = True
    keeps_documents_apart: ClassVar[bool] = True

    moves_queries: ClassVar[bool] = True
    """Whether ranks that gather keys and values may attend for each other's queries, which see fewer keys or more."""

    @property
    def projects_keys(self) -> bool:
        """Whether the input projection yields keys."""
        return True

    @property
    def window(self) -> int | None:
        """Keys that a query can see, its own the last of them; None: all up to it."""
        return None

    @property
    def queries_per_group(self) -> int:
        """Query heads that share a key and value head (GQA)."""
        return self.config.num_attention_heads // self.config.num_query_groups

    def num_units(self) -> int:
        """Query groups."""
        return self.config.num_query_groups

    def unit_width(self) -> int:
        """The group's queries, its key (unless it has none of its own) and its value."""
        return (self.queries_per_group + self.projects_keys + 1) * self.head_dim

    def output_width(self) -> int:
        """One output for each query of the group."""
        return self.queries_per_group * self.head_dim

    def frozen_keys(self, v_bshd: Tensor, first_position: int, part: Part) -> Tensor:
        """Keys [b, s, groups, d] of a mixer that projects none, from a position on."""
        raise AssertionError(f"{type(self).__name__} projects its keys")

    @abstractmethod
    def attend(self, q_bthd: Tensor, k_bshd: Tensor, v_bshd: Tensor, query_offset: int, part: Part) -> Tensor:
        """Outputs [b, t, hq, d] of queries over the keys up to the last of them.

        Args:
            q_bthd: queries of the groups of `part`, group after group.
            k_bshd: keys, one head a group.
            v_bshd: values, one head a group.
            query_offset: place of the first query among the keys, s - t.
            part: which groups and positions these are.
        """

    def mix(self, x_tbuw: Tensor, part: Part) -> Tensor:
        """See `Mixer.mix`: cut the rows, rotate, attend."""
        t, b, u, _ = x_tbuw.shape
        o_bthd = self.attend_to_past(*self._heads(x_tbuw, part), part)
        return batch_first(o_bthd).reshape(t, b, u, self.output_width())

    def _heads(self, x_tbuw: Tensor, part: Part) -> tuple[Tensor, Tensor | None, Tensor]:
        """Queries [b, t, hq, d], keys, where they are projected, and values [t, b, groups, d]."""
        widths = [self.queries_per_group * self.head_dim, *([self.head_dim] * (self.projects_keys + 1))]
        if self.mixer_config.position_encoding == "rope" and self.projects_keys:
            by = rotation(part.first_position, len(x_tbuw), self.head_dim, self.config.rotary_base, x_tbuw.device)
            q_bthd, k_btgd, v_btgd = rotated_heads(x_tbuw, by, widths)
            return q_bthd, batch_first(k_btgd), batch_first(v_btgd)
        q_tbuw, *keys, v_tbgd = cut(x_tbuw, widths)
        q_tbhd = q_tbuw.unflatten(-1, (-1, self.head_dim)).flatten(2, 3)
        return batch_first(q_tbhd), keys[0] if keys else None, v_tbgd

    def attend_to_past(self, q_bthd: Tensor, k_tbgd: Tensor | None, v_tbgd: Tensor, part: Part) -> Tensor:
        """Outputs [b, t, hq, d] of queries over their own keys and values and those before, all that can be seen.

        Args:
            q_bthd: as in `attend`.
            k_tbgd: keys of the same positions, one head a group; None: the mixer projects none.
            v_tbgd: their values.
            part: as in `attend`.
        """
        if part.past.ranks is not None and self.moves_queries and self.window is None and len(v_tbgd) % 2 == 0:
            return self._attend_in_zigzag(q_bthd, k_tbgd, v_tbgd, part, part.past.ranks)
        v_bshd = batch_first(part.past.rows_so_far("values", v_tbgd, self.window))
        query_offset = v_bshd.shape[1] - len(v_tbgd)
        if k_tbgd is None:
            k_bshd = self.frozen_keys(v_bshd, part.first_position - query_offset, part)
        else:
            k_bshd = batch_first(part.past.rows_so_far("keys", k_tbgd, self.window))
        return self.attend(q_bthd, k_bshd, v_bshd, query_offset, part)

    def _attend_in_zigzag(
        self, q_bthd: Tensor, k_tbgd: Tensor | None, v_tbgd: Tensor, part: Part, ranks: ProcessGroup
    ) -> Tensor:
        """See `attend_to_past`, with all keys and values here, for an early and a late piece of the queries."""
        v_bshd = batch_first(gather_sequence(v_tbgd, ranks))
        k_bshd = self.frozen_keys(v_bshd, 0, part) if k_tbgd is None else batch_first(gather_sequence(k_tbgd, ranks))
        pieces = batch_first(to_zigzag(batch_first(q_bthd), ranks)).chunk(2, 1)
        length, outputs = pieces[0].shape[1], []
        for piece, q_piece in zip(zigzag_pieces(ranks), pieces, strict=True):
            seen = (piece + 1) * length
            outputs.append(self.attend(q_piece, k_bshd[:, :seen], v_bshd[:, :seen], piece * length, part))
        return batch_first(from_zigzag(batch_first(torch.cat(outputs, 1)), ranks))
