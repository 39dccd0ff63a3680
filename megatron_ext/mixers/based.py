"""Based: linear attention with the second-order Taylor features of exp (Arora et al. 2024, arXiv 2402.18668).

The paper's models alternate it with sliding-window attention: `based,attention`, with `mixers.attention.window`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from torch import Tensor

from kernels.based import based, by_features, num_features
from kernels.common.fusion import cut, fused
from kernels.gated_linear_attention import gated_linear_attention
from megatron_ext.config.traits import MixerTraits
from megatron_ext.mixers.core.base import Mixer, MixInput, batch_first
from megatron_ext.mixers.core.history import EMPTY_HISTORY
from megatron_ext.mixers.core.registry import register
from megatron_ext.mixers.core.settings import BasedConfig
from megatron_ext.mixers.core.shapes import StateShape
from megatron_ext.mixers.core.stateful import scan


@register("based")
class Based(Mixer):
    """Based's linear attention; the head group is a head.

    The weight of a key is 1 + s + s^2 / 2 with s = q.k / sqrt(feature_dim), divided by the sum of all weights so far.
    Rows of the input projection, per head: [query | key | value].
    """

    traits: ClassVar[MixerTraits] = MixerTraits(supports_state_passing=True, supports_document_masking=True)
    mixer_config: BasedConfig

    def num_head_groups(self) -> int:
        """Return the number of heads."""
        return self.config.num_attention_heads

    def head_group_width(self) -> int:
        """Return the width of a head's query, key and value together."""
        return sum(self._widths)

    @property
    def _widths(self) -> list[int]:
        feature_dim = self.mixer_config.feature_dim
        return [feature_dim, feature_dim, self.head_dim]

    def output_width(self) -> int:
        """Return the width of a head's output."""
        return self.head_dim

    def mix(self, x_tbuw: Tensor, part: MixInput) -> Tensor:
        """Implement `Mixer.mix`: the `based` op, or a scan over its features if there are earlier positions."""
        q_btuf, k_btuf, v_btud = cut_heads(x_tbuw, self._widths)
        if part.history is EMPTY_HISTORY:
            return batch_first(based(q_btuf, k_btuf, v_btud))
        scan_on = partial(scan, gated_linear_attention, part=part, scale=1.0)
        return batch_first(by_features(q_btuf, k_btuf, v_btud, scan_on))

    @property
    def num_features(self) -> int:
        """Number of features of a query or key."""
        return num_features(self.mixer_config.feature_dim)

    def state_shape(self) -> StateShape:
        """Implement `Mixer.state_shape`: the sum of weights is one more value column."""
        return StateShape(1, self.num_features, self.head_dim + 1)

    def mixing_flops(self, seq_length: int) -> float:
        """Count the write to the state, the read from it, and the sum of weights."""
        return self.num_head_groups() * 4 * self.num_features * (self.head_dim + 1)


@fused
def cut_heads(x_tbuw: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Split rows into queries, keys and values [b, t, u, ...], stored as [t, b, u, ...]."""
    q, k, v = (x.contiguous().transpose(0, 1) for x in cut(x_tbuw, widths))
    return q, k, v
