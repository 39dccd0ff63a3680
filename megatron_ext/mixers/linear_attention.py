"""Linear attention: a recurrent state without decay (Katharopoulos et al. 2020, arXiv 2006.16236)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from kernels.common.fusion import cut, fused
from kernels.gated_linear_attention import gated_linear_attention
from megatron_ext.mixers.core.base import MixInput, batch_first
from megatron_ext.mixers.core.registry import register
from megatron_ext.mixers.core.settings import LinearAttentionConfig
from megatron_ext.mixers.core.stateful import StatefulMixer, scan

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "identity": lambda x: x,
}


@register("linear_attention")
class LinearAttention(StatefulMixer):
    """Linear attention; see `StatefulMixer` for the rows of its projection."""

    mixer_config: LinearAttentionConfig

    def read_states(self, x_tbuw: Tensor, part: MixInput) -> tuple[Tensor, Tensor]:
        """Implement `StatefulMixer.read_states`: the state sums the outer products of mapped keys and values."""
        *heads, gate = mapped_heads(x_tbuw, self.mixer_config.feature_map, self.head_widths)
        return scan(gated_linear_attention, *heads, part=part), gate


@fused
def mapped_heads(x_tbuw: Tensor, feature_map: str, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Apply the feature map to queries and keys, and split off the other features unchanged: [b, t, u, width] each."""
    q, k, *others = cut(x_tbuw, widths)
    q, k = (FEATURE_MAPS[feature_map](x) for x in (q, k))
    return tuple(batch_first(x).contiguous() for x in (q, k, *others))
