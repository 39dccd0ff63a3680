"""RWKV-6 and RWKV-7 mixers, and the token shift of the RWKV-7 block.

Shape suffixes: b batch, t position, h hidden, u head, d channel of a head, r rank of a low-rank projection, i mixture.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache_selectron import EmptyHistory
from .mixer_selectron import Mixer, Positions, mix_with_previous
from .states_selectron import rwkv6, rwkv7

MIN_LOG_DECAY = -math.exp(-0.5)


class ShiftedNorm(nn.Module):
    """Norm followed by the token shift y_t + (y_{t-1} - y_t) * mu.

    Args:
        norm: norm whose output is shifted.
        hidden_size: width of the hidden states.
    """

    def __init__(self, norm: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.norm = norm
        self.mu = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x_bth: Tensor, history: EmptyHistory, name: str) -> Tensor:
        """Map hidden states [b, t, h] to [b, t, h]. The previous row is cached under `name`."""
        normed = self.norm(x_bth)
        (shifted,) = mix_with_previous(normed, history.previous_rows(name, normed, 1), self.mu[None, None, None])
        return shifted


class RWKVMixer(Mixer):
    """Base class of the RWKV mixers.

    The input of each projection is its own interpolation of a token with the previous one.
    """

    shifts_tokens = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.r_proj, self.k_proj, self.v_proj = (self.projection() for _ in range(3))
        self.group_norm_weight, self.group_norm_bias = (self.channel_parameter() for _ in range(2))
        self.add_parameters()
        self.out_proj = self.linear(self.num_heads * self.head_dim, self.hidden_size)

    def add_parameters(self) -> None:
        """Create the parameters that the RWKV mixers do not share."""
        raise NotImplementedError

    def projection(self) -> nn.Parameter:
        """Return a projection from the hidden state to the heads, [u, d, h]."""
        return self.parameter(self.num_heads, self.head_dim, self.hidden_size)

    def channel_parameter(self) -> nn.Parameter:
        """Return a parameter with one element per channel of each head, [u, d]."""
        return self.parameter(self.num_heads, self.head_dim)

    def low_rank_parameters(self, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
        """Return the two matrices of a low-rank projection: down [r, h] and up [u, d, r]."""
        return self.parameter(rank, self.hidden_size), self.parameter(self.num_heads, self.head_dim, rank)

    def group_norm(self, o_btud: Tensor) -> Tensor:
        """Normalize each head's output by its own mean and variance (group norm), fp32."""
        normed = F.layer_norm(o_btud.float(), o_btud.shape[-1:], eps=self.head_dim * self.epsilon)
        return normed * self.group_norm_weight.float() + self.group_norm_bias.float()


def to_heads(x_bth: Tensor, weight_udh: Tensor) -> Tensor:
    """Project hidden states, or their low-rank projection, to the heads, [b, t, u, d]."""
    return F.linear(x_bth, weight_udh.flatten(0, 1)).unflatten(-1, weight_udh.shape[:2])


class RWKV6(RWKVMixer):
    """Time mixing of RWKV-6, Finch (Peng et al. 2024, arXiv 2404.05892).

    The rows of `mu` belong to decay, key, value, receptance and gate.
    """

    def add_parameters(self) -> None:
        """Implement `RWKVMixer.add_parameters`."""
        hidden, mix_rank = self.hidden_size, self.settings.mix_rank
        self.mu_of_mixing, self.mu = self.parameter(hidden), self.parameter(5, hidden)
        self.mix_down, self.mix_up = self.parameter(5, mix_rank, hidden), self.parameter(5, hidden, mix_rank)
        self.g_proj = self.projection()
        self.decay_down, self.decay_up = self.low_rank_parameters(self.settings.decay_rank)
        self.decay_base, self.bonus = self.channel_parameter(), self.channel_parameter()

    def forward(self, x_bth: Tensor, history: EmptyHistory, positions: Positions) -> Tensor:
        """Implement `Mixer.forward`."""
        w, k, v, r, g = self._inputs(x_bth, history.previous_rows("hidden_states", x_bth, 1))
        decay_logits = to_heads(F.linear(w, self.decay_down).tanh(), self.decay_up)
        r, k, v, g = map(to_heads, (r, k, v, g), (self.r_proj, self.k_proj, self.v_proj, self.g_proj))
        log_decay = -(self.decay_base.float() + decay_logits.float()).exp()
        out, state = rwkv6(r, k, v, log_decay, self.bonus, history.state("state"))
        history.store_state("state", state)
        gated = self.group_norm(out.to(x_bth.dtype)) * F.silu(g.float())
        projected: Tensor = self.out_proj(gated.to(x_bth.dtype).flatten(2))
        return projected

    def _inputs(self, x_bth: Tensor, previous_b1h: Tensor) -> tuple[Tensor, ...]:
        """Return the five mixtures, [b, t, h] each."""
        (mixed,) = mix_with_previous(x_bth, previous_b1h, self.mu_of_mixing[None, None, None])
        low_rank = torch.einsum("bth,irh->ibtr", mixed, self.mix_down).tanh()
        offsets = torch.einsum("ibtr,ihr->ibth", low_rank, self.mix_up)
        return mix_with_previous(x_bth, previous_b1h, self.mu[:, None, None] + offsets)


class RWKV7(RWKVMixer):
    """Time mixing of RWKV-7, Goose (Peng et al. 2025, arXiv 2503.14456). Every layer is as the paper's first layer.

    There is therefore no value residual. The rows of `mu` belong to receptance, decay, key, value, learning rate and
    gate.
    """

    def add_parameters(self) -> None:
        """Implement `RWKVMixer.add_parameters`."""
        head_factor, settings = 2.5 * self.head_dim / 64, self.settings
        self.mu = self.parameter(6, self.hidden_size)
        self.decay_down, self.decay_up = self.low_rank_parameters(settings.decay_rank or self._rank(head_factor))
        self.rate_down, self.rate_up = self.low_rank_parameters(settings.rate_rank or self._rank(head_factor))
        self.gate_down, self.gate_up = self.low_rank_parameters(settings.gate_rank or self._rank(5))
        self.decay_base, self.rate_base, self.removal_scale = (self.channel_parameter() for _ in range(3))
        self.key_rate, self.bonus = self.channel_parameter(), self.channel_parameter()

    def _rank(self, factor: float) -> int:
        return max(32, round(factor * math.sqrt(self.hidden_size) / 32) * 32)

    def forward(self, x_bth: Tensor, history: EmptyHistory, positions: Positions) -> Tensor:
        """Implement `Mixer.forward`."""
        weight = self.mu[:, None, None]
        r, w, k, v, a, g = mix_with_previous(x_bth, history.previous_rows("hidden_states", x_bth, 1), weight)
        decay_logits = to_heads(F.linear(w, self.decay_down).tanh(), self.decay_up)
        rate_logits = to_heads(F.linear(a, self.rate_down), self.rate_up)
        gate = to_heads(F.linear(g, self.gate_down).sigmoid(), self.gate_up)
        r, k, v = map(to_heads, (r, k, v), (self.r_proj, self.k_proj, self.v_proj))
        log_decay = MIN_LOG_DECAY * (self.decay_base.float() + decay_logits.float()).sigmoid()
        rate = (self.rate_base.float() + rate_logits.float()).sigmoid()
        removal_key = F.normalize(k.float() * self.removal_scale.float(), dim=-1)
        k = k.float() * (1 + (rate - 1) * self.key_rate.float())
        k, a_key, b_key = (x.to(v.dtype) for x in (k, -removal_key, removal_key * rate))
        out, state = rwkv7(r, k, v, log_decay, a_key, b_key, history.state("state"))
        history.store_state("state", state)
        bonus = (r.float() * k.float() * self.bonus.float()).sum(-1, keepdim=True) * v.float()
        gated = (self.group_norm(out.to(x_bth.dtype)) + bonus) * gate.float()
        projected: Tensor = self.out_proj(gated.to(x_bth.dtype).flatten(2))
        return projected
