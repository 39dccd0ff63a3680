"""Linear attention: a state that only adds (Katharopoulos et al. 2020, arXiv 2006.16236)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from kernels.fusion import cut, fused
from kernels.gated_linear_attention import gated_linear_attention
from megatron_ext.mixers.base import Part, batch_first
from megatron_ext.mixers.registry import register
from megatron_ext.mixers.settings import LinearAttentionConfig
from megatron_ext.mixers.stateful import StatefulMixer, walk

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "identity": lambda x: x,
}


@register("linear_attention")
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
