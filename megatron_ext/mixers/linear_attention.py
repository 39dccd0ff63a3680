"""Linear attention: a state that only adds (Katharopoulos et al. 2020, arXiv 2006.16236)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch.nn.functional as F
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from kernels.fusion import cut, fused
from kernels.gated_linear_attention import gated_linear_attention
from megatron_ext.config.schema import STRICT
from megatron_ext.mixers.base import Part, batch_first
from megatron_ext.mixers.registry import register
from megatron_ext.mixers.stateful import StatefulMixer, walk

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "identity": lambda x: x,
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LinearAttentionConfig:
    """Linear attention.

    The sum of weights that the paper divides by is left out: the norm of each head's output would undo it.

    Attributes:
        feature_map: of queries and keys: elu(x) + 1 (the paper's), relu, or none.
        expand_v: width of a value head over that of a key head.
        output_gate: whether a SiLU gate follows the output norm.
    """

    feature_map: Literal["elu", "relu", "identity"] = "elu"
    expand_v: PositiveInt = 1
    output_gate: bool = False


@register("linear_attention", LinearAttentionConfig)
class LinearAttention(StatefulMixer):
    """Linear attention; see `StatefulMixer` for the rows of its projection."""

    mixer_config: LinearAttentionConfig

    def read_states(self, x_tbuw: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """See `StatefulMixer.read_states`: the sum of all products of features so far."""
        *heads, gate = mapped_heads(x_tbuw, self.mixer_config.feature_map, self.head_widths)
        return walk(gated_linear_attention, *heads, part=part), gate


@fused
def mapped_heads(x_tbuw: Tensor, feature_map: str, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Features of queries and keys, and the other parts as they are: [b, t, u, width] each."""
    q, k, *others = cut(x_tbuw, widths)
    q, k = (FEATURE_MAPS[feature_map](x) for x in (q, k))
    return tuple(batch_first(x).contiguous() for x in (q, k, *others))
