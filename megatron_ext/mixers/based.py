"""Based: linear attention with the first terms of the exponential (Arora et al. 2024, arXiv 2402.18668).

The paper's models take turns with attention over a short window: `based,attention`, with `mixers.attention.window`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from torch import Tensor

from kernels.based import based, by_features, num_features
from kernels.fusion import cut, fused
from kernels.gated_linear_attention import gated_linear_attention
from megatron_ext.mixers.base import Mixer, Part, StateShape, batch_first
from megatron_ext.mixers.past import BEGINNING
from megatron_ext.mixers.registry import register
from megatron_ext.mixers.settings import BasedConfig
from megatron_ext.mixers.stateful import walk


@register("based")
class Based(Mixer):
    """Based's linear attention; its unit is a head.

    A key weighs 1 + s + s^2 / 2, s = q.k / sqrt(feature_dim), over the sum of all weights so far. Rows of the input
    projection, per head: [query | key | value].
    """

    hands_on_states: ClassVar[bool] = True
    keeps_documents_apart: ClassVar[bool] = True
    mixer_config: BasedConfig

    def num_units(self) -> int:
        """Heads."""
        return self.config.num_attention_heads

    def unit_width(self) -> int:
        """Query, key and value of a head."""
        return sum(self._widths)

    @property
    def _widths(self) -> list[int]:
        feature_dim = self.mixer_config.feature_dim
        return [feature_dim, feature_dim, self.head_dim]

    def output_width(self) -> int:
        """A head's output."""
        return self.head_dim

    def mix(self, x_tbuw: Tensor, part: Part) -> Tensor:
        """See `Mixer.mix`: the op, or a walk over the states of its features where something lies before."""
        q_btuf, k_btuf, v_btud = cut_heads(x_tbuw, self._widths)
        if part.past is BEGINNING:
            return batch_first(based(q_btuf, k_btuf, v_btud))
        walk_on = partial(walk, gated_linear_attention, part=part, scale=1.0)
        return batch_first(by_features(q_btuf, k_btuf, v_btud, walk_on))

    @property
    def num_features(self) -> int:
        """Features of a query or key."""
        return num_features(self.mixer_config.feature_dim)

    def state_shape(self) -> StateShape:
        """See `Mixer.state_shape`: the weights are summed like one more value."""
        return StateShape(1, self.num_features, self.head_dim + 1)

    def mixing_flops(self, seq_length: int) -> float:
        """Writing to the state, reading from it, and the sum of weights."""
        return self.num_units() * 4 * self.num_features * (self.head_dim + 1)


@fused
def cut_heads(x_tbuw: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [b, t, u, ...], in memory [t, b, u, ...]."""
    q, k, v = (x.contiguous().transpose(0, 1) for x in cut(x_tbuw, widths))
    return q, k, v
