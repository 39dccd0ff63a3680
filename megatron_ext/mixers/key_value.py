"""What softmax attention and the Top-1 mixers share: queries in groups, keys, values, rotary positions."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from megatron_ext.mixers.base import Mixer, Part, batch_first, rotate


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

    @property
    def projects_keys(self) -> bool:
        """Whether the input projection yields keys."""
        return True

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

    def frozen_keys(self, v_bshd: Tensor, part: Part) -> Tensor:
        """Keys [b, s, groups, d] of a mixer that projects none."""
        raise AssertionError(f"{type(self).__name__} projects its keys")

    @abstractmethod
    def attend(self, q_bthd: Tensor, k_bshd: Tensor, v_bshd: Tensor, part: Part) -> Tensor:
        """Outputs [b, t, hq, d] of queries that begin at `part.first_position`, over the whole sequence of keys.

        Args:
            q_bthd: queries of the groups of `part`, group after group.
            k_bshd: keys, one head a group.
            v_bshd: values, one head a group.
            part: which groups and positions these are.
        """

    def mix(self, x_tbuw: Tensor, part: Part) -> Tensor:
        """See `Mixer.mix`: cut the rows, rotate, gather keys and values where asked, attend."""
        t, b, u, _ = x_tbuw.shape
        widths = [self.queries_per_group * self.head_dim, *([self.head_dim] * (self.projects_keys + 1))]
        q, *keys, v = x_tbuw.split(widths, -1)
        q = q.reshape(t, b, u * self.queries_per_group, self.head_dim)
        if self.mixer_config.position_encoding == "rope" and self.projects_keys:
            q, keys = self._rotate(q, part), [self._rotate(keys[0], part)]
        if part.gather is not None:
            *keys, v = (part.gather(x) for x in (*keys, v))
        v_bshd = batch_first(v)
        k_bshd = batch_first(keys[0]) if keys else self.frozen_keys(v_bshd, part)
        o_bthd = self.attend(batch_first(q), k_bshd, v_bshd, part)
        return batch_first(o_bthd).reshape(t, b, u, self.output_width())

    def _rotate(self, x_tbnd: Tensor, part: Part) -> Tensor:
        return rotate(x_tbnd, self.config.rotary_base, part.first_position)
