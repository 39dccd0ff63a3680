"""RetNet: linear attention with a fixed decay per head (Sun et al. 2023, arXiv 2307.08621)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gated_linear_attention import gated_linear_attention
from megatron_ext.mixers.core.base import MixInput
from megatron_ext.mixers.core.registry import register
from megatron_ext.mixers.core.rotary import rotated_heads, rotation
from megatron_ext.mixers.core.settings import RetNetConfig
from megatron_ext.mixers.core.stateful import StatefulMixer, scan


@register("retnet")
class RetNet(StatefulMixer):
    """Multi-scale retention; see `StatefulMixer` for the rows of its projection.

    The decay of head h of the whole layer is 1 - 2^(-5-h). Queries and keys are rotated by position. Unlike in the
    paper, the norm of a head's output has a weight.
    """

    mixer_config: RetNetConfig

    def read_states(self, x_tbuw: Tensor, part: MixInput) -> tuple[Tensor, Tensor]:
        """Implement `StatefulMixer.read_states`: rotate, then scan with a fixed decay."""
        rotary = rotation(part.first_position, len(x_tbuw), self.head_dim, self.config.rotary_base, x_tbuw.device)
        q, k, v, gate = rotated_heads(x_tbuw, rotary, self.head_widths)
        return scan(gated_linear_attention, q, k, v, head_log_decays(part, q.device), part=part), gate


def head_log_decays(part: MixInput, device: torch.device) -> Tensor:
    """Return each head's log decay [u], fp32."""
    heads = torch.arange(part.first_head_group, part.first_head_group + part.num_head_groups, device=device)
    # log1p: fp32 would round 1 - x for small x.
    return torch.log1p(-torch.exp2(-5.0 - heads.float()))
