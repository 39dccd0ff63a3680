"""RetNet: a state a head that fades at a fixed rate of its own (Sun et al. 2023, arXiv 2307.08621)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gated_linear_attention import gated_linear_attention
from megatron_ext.mixers.base import Part
from megatron_ext.mixers.registry import register
from megatron_ext.mixers.rotary import rotated_heads, rotation
from megatron_ext.mixers.settings import RetNetConfig
from megatron_ext.mixers.stateful import StatefulMixer, walk


@register("retnet")
class RetNet(StatefulMixer):
    """Multi-scale retention; see `StatefulMixer` for the rows of its projection.

    Head h of the whole layer keeps 1 - 2^(-5-h) of its state from token to token; queries and keys are rotated by
    position. The paper's norm of a head's output has no weight; this one has.
    """

    mixer_config: RetNetConfig

    def read_states(self, x_tbuw: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """See `StatefulMixer.read_states`: rotate, fade and add."""
        by = rotation(part.first_position, len(x_tbuw), self.head_dim, self.config.rotary_base, x_tbuw.device)
        q, k, v, gate = rotated_heads(x_tbuw, by, self.head_widths)
        return walk(gated_linear_attention, q, k, v, log_fading(part, q.device), part=part), gate


def log_fading(part: Part, device: torch.device) -> Tensor:
    """Log decay of each head [u], fp32."""
    heads = torch.arange(part.first_unit, part.first_unit + part.num_units, device=device)
    # log(1 - x) for small x: fp32 would round 1 - x first.
    return torch.log1p(-torch.exp2(-5.0 - heads.float()))
