"""RWKV-7 (Goose): a recurrent state with a generalised delta rule and data-dependent decay per key feature.

Peng et al. 2025 (arXiv 2503.14456).
"""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.fusion import fused
from kernels.rwkv7 import rwkv7
from megatron_ext.mixers.core.base import MixInput, batch_first
from megatron_ext.mixers.core.registry import register
from megatron_ext.mixers.core.rwkv import RWKVMixer, channel_position, normed_heads
from megatron_ext.mixers.core.settings import RWKV7Config
from megatron_ext.mixers.core.stateful import scan
from megatron_ext.mixers.core.token_shift import mixtures, ramp, ramps
from megatron_ext.parallel.parameters import Initializer, by_channel, constant, normal, zeros

MIN_LOG_DECAY = -math.exp(-0.5)
"""Lower bound of the log decay, as in the paper: a key feature keeps at least 0.545 per token, before any removal."""


@register("rwkv7")
class RWKV7(RWKVMixer):
    """RWKV-7's time mixing; see `RWKVMixer`.

    Every layer is like the paper's first. The paper's later layers mix the first layer's values into their own (the
    value residual). This mixer omits the value residual, because those values would have to pass through the pipeline
    with the hidden states.

    Rows of `mu`, as in the authors' code: receptance, decay, key, value, learning rate, gate. Features of a head:
    receptance, key, value, decay logits, learning rate logits, gate.
    """

    num_features: ClassVar[int] = 6
    mixer_config: RWKV7Config

    def add_parameters(self) -> None:
        """Create the parameters of mixtures, decays, learning rates and gates, and the scales of keys and bonus."""
        hidden, left = self.config.hidden_size, self.layers_left
        mu_initializer = ramps(*(ramp(share * left) for share in (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)))
        self.mu = self.new_replicated_parameter(mu_initializer, 6, hidden, weight_decay=False)
        head_rank_factor = 2.5 * self.head_dim / 64
        self.decay_down, self.decay_up = self._new_low_rank(self.mixer_config.decay_rank, head_rank_factor)
        self.rate_down, self.rate_up = self._new_low_rank(self.mixer_config.rate_rank, head_rank_factor)
        self.gate_down, self.gate_up = self._new_low_rank(self.mixer_config.gate_rank, 5)
        decay_initializer = _initial_decay(self.depth, self.head_dim)
        self.decay_base = self.new_parameter_of_head_groups(decay_initializer, self.head_dim, in_fp32=True)
        self.rate_base = self.new_parameter_of_head_groups(_initial_rate(self.head_dim), self.head_dim)
        self.removal_scale = self.new_parameter_of_head_groups(by_channel(_initial_removal), self.head_dim)
        self.key_rate = self.new_parameter_of_head_groups(constant(1.02), self.head_dim)
        self.bonus = self.new_parameter_of_head_groups(constant(-0.04), self.head_dim)

    def _new_low_rank(self, rank: int | None, factor: float) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        """Return new low-rank matrices: down [r, h], zeros, and up [u, d, r].

        Entries of `up` have the spread of the authors' orthogonal matrix, whose columns have length 0.1.
        """
        rank = rank or default_rank(factor, self.config.hidden_size)
        down = self.new_replicated_parameter(zeros, rank, self.config.hidden_size)
        return down, self.new_parameter_of_head_groups(
            normal(0.1 / math.sqrt(self.num_head_groups() * self.head_dim)), self.head_dim, rank
        )

    def project(self, x_tbh: Tensor, before_1bh: Tensor) -> tuple[Tensor, ...]:
        """Implement `RWKVMixer.project`."""
        r, w, k, v, a, g = mixtures(x_tbh, before_1bh, self.replicated(self.mu))
        decay_logits = self.to_heads(self.project_down(w, self.decay_down).tanh(), self.decay_up)
        rate_logits = self.to_heads(self.project_down(a, self.rate_down), self.rate_up)
        gate = self.to_heads(self.project_down(g, self.gate_down).sigmoid(), self.gate_up)
        r, k, v = map(self.to_heads, (r, k, v), (self.r_proj, self.k_proj, self.v_proj))
        return r, k, v, decay_logits, rate_logits, gate

    def mix(self, x_tbuw: Tensor, part: MixInput) -> Tensor:
        """Implement `Mixer.mix`: scan, norm, bonus of the current token, gate."""
        r, k, v, decay_logits, rate_logits, gate = x_tbuw, *part.more
        names = (self.decay_base, self.rate_base, self.removal_scale, self.key_rate)
        heads = scan_inputs(r, k, v, decay_logits, rate_logits, *(self.own_head_groups(p, part) for p in names))
        o = scan(partial(rwkv7, log_decay_bound=MIN_LOG_DECAY), *heads, part=part)
        r, k, v, *_ = heads
        return gated_output(o, r, k, v, self.own_head_groups(self.bonus, part), gate, *self.own_group_norm(part))

    def mixing_flops(self, seq_length: int) -> float:
        """Count the read of the removed value, its removal, the write, the read, and the bonus of the current token."""
        return self.num_head_groups() * (8 * self.head_dim**2 + 5 * self.head_dim)


def default_rank(factor: float, hidden_size: int) -> int:
    """Return the default rank of a low-rank projection, as in the authors' code."""
    return max(32, round(factor * math.sqrt(hidden_size) / 32) * 32)


@fused
def scan_inputs(
    r_tbud: Tensor,
    k_tbud: Tensor,
    v_tbud: Tensor,
    decay_logits_tbud: Tensor,
    rate_logits_tbud: Tensor,
    decay_base_ud: Tensor,
    rate_base_ud: Tensor,
    removal_scale_ud: Tensor,
    key_rate_ud: Tensor,
) -> tuple[Tensor, ...]:
    """Return receptances, keys, values, log decays (fp32), removal keys and their replacements: [b, t, u, d] each."""
    log_decay = MIN_LOG_DECAY * (decay_base_ud.float() + decay_logits_tbud.float()).sigmoid()
    rate = (rate_base_ud.float() + rate_logits_tbud.float()).sigmoid()
    removed = F.normalize(k_tbud.float() * removal_scale_ud.float(), dim=-1)
    k = k_tbud.float() * (1 + (rate - 1) * key_rate_ud.float())
    k, a, b = (x.to(v_tbud.dtype) for x in (k, -removed, removed * rate))
    return tuple(batch_first(x).contiguous() for x in (r_tbud, k, v_tbud, log_decay, a, b))


@fused
def gated_output(
    o_btud: Tensor,
    r_btud: Tensor,
    k_btud: Tensor,
    v_btud: Tensor,
    bonus_ud: Tensor,
    gate_tbud: Tensor,
    weight_ud: Tensor,
    bias_ud: Tensor,
    epsilon: float,
) -> Tensor:
    """Normalise each head's output, add the bonus of the current token, and multiply by the gate: [t, b, u, d]."""
    bonus = (r_btud.float() * k_btud.float() * bonus_ud.float()).sum(-1, keepdim=True) * v_btud.float()
    o_tbud = normed_heads(o_btud, weight_ud, bias_ud, epsilon) + batch_first(bonus)
    return (o_tbud * gate_tbud.float()).to(gate_tbud.dtype).contiguous()


def _initial_decay(depth: float, head_dim: int) -> Initializer:
    power = 1 + depth**0.3
    return by_channel(lambda channel: -5.5 + 6 * channel_position(channel) ** power + 2.5 * _zigzag(channel, head_dim))


def _initial_rate(head_dim: int) -> Initializer:
    return by_channel(
        lambda channel: -0.19 + 0.3 * _zigzag(channel, head_dim) + 0.4 * (channel_position(channel) - 0.5)
    )


def _initial_removal(channel: Tensor) -> Tensor:
    return 0.71 - 0.1 * (channel_position(channel) - 0.5)


def _zigzag(channel: Tensor, head_dim: int) -> Tensor:
    """Return a signed square from -1 to 1 along the channels of each head."""
    half = (head_dim - 1) / 2
    line = (channel % head_dim - half) / half
    return line * line.abs()
