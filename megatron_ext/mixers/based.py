"""Based: linear attention with the first terms of the exponential (Arora et al. 2024, arXiv 2402.18668).

The paper's models take turns with attention over a short window: `based,attention`, with `mixers.attention.window`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from kernels.fusion import fused
from kernels.gated_linear_attention import gated_linear_attention
from megatron_ext.config.schema import STRICT
from megatron_ext.mixers.base import Mixer, Part, batch_first
from megatron_ext.mixers.registry import register
from megatron_ext.mixers.stateful import walk


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BasedConfig:
    """Based.

    Attributes:
        feature_dim: width of a head's queries and keys, from which the features are made.
    """

    feature_dim: PositiveInt = 16


@register("based", BasedConfig)
class Based(Mixer):
    """Based's linear attention; its unit is a head.

    A key weighs 1 + s + s^2 / 2, s = q.k / sqrt(feature_dim), over the sum of all weights so far. Rows of the input
    projection, per head: [query | key | value].
    """

    hands_on_states: ClassVar[bool] = True
    mixer_config: BasedConfig

    def num_units(self) -> int:
        """Heads."""
        return self.config.num_attention_heads

    def unit_width(self) -> int:
        """Query, key and value of a head."""
        return 2 * self.mixer_config.feature_dim + self.head_dim

    def output_width(self) -> int:
        """A head's output."""
        return self.head_dim

    def mix(self, x_tbuw: Tensor, part: Part) -> Tensor:
        """See `Mixer.mix`: features, linear attention."""
        heads = featured_heads(x_tbuw, self.mixer_config.feature_dim)
        sums_btue = walk(gated_linear_attention, *heads, part=part, scale=1.0)
        return weighed(sums_btue).to(x_tbuw.dtype)

    @property
    def num_features(self) -> int:
        """Features that `taylor_features` makes."""
        width = self.mixer_config.feature_dim
        return 1 + width + width * (width + 1) // 2

    def summary_size(self) -> int:
        """See `Mixer.summary_size`."""
        return self.num_features * (self.num_features + self.head_dim + 1)

    def mixing_flops(self, seq_length: int) -> float:
        """Writing to the state, reading from it, and the sum of weights."""
        return self.num_units() * 4 * self.num_features * (self.head_dim + 1)


@fused
def featured_heads(x_tbuw: Tensor, feature_dim: int) -> tuple[Tensor, ...]:
    """Features of queries and keys, and values with a 1 behind them, which sums the weights: [b, t, u, ...] each."""
    q, k, v = batch_first(x_tbuw).float().split([feature_dim, feature_dim, x_tbuw.shape[-1] - 2 * feature_dim], -1)
    return taylor_features(q), taylor_features(k), torch.cat([v, torch.ones_like(v[..., :1])], -1)


@fused
def weighed(sums_btue: Tensor) -> Tensor:
    """Sums over the weights behind them: [b, t, u, e + 1] to [t, b, u, e]."""
    return batch_first(sums_btue[..., :-1] / sums_btue[..., -1:]).contiguous()


def taylor_features(x_tbuf: Tensor) -> Tensor:
    """Features whose products are 1 + s + s^2 / 2, s = x.y / sqrt(f): [..., f] to [..., 1 + f + f (f + 1) / 2].

    Each pair of features once, as x_i x_j and x_j x_i are the same.
    """
    width = x_tbuf.shape[-1]
    i, j = torch.triu_indices(width, width, device=x_tbuf.device)
    weights = torch.where(i == j, 0.5**0.5, 1.0)
    x_tbuf = x_tbuf * width**-0.25
    return torch.cat([torch.ones_like(x_tbuf[..., :1]), x_tbuf, x_tbuf[..., i] * x_tbuf[..., j] * weights], -1)
