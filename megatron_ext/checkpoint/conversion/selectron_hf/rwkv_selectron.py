"""RWKV-6 and RWKV-7, and the token shift of RWKV-7's block.

Suffixes: b batch, t position, h hidden, u head, d its channels, r rank of a narrow projection, i which of the inputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache_selectron import Beginning
from .mixer_selectron import Mixer, Positions, mixtures
from .states_selectron import rwkv6, rwkv7

LEAST_LOG_DECAY = -math.exp(-0.5)


class ShiftedNorm(nn.Module):
    """A norm, and behind it the token shift: y_t + (y_{t-1} - y_t) * mu.

    Args:
        norm: what is shifted.
        hidden_size: width of the hidden states.
    """

    def __init__(self, norm: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.norm = norm
        self.mu = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x_bth: Tensor, past: Beginning, name: str) -> Tensor:
        """[b, t, h] to the same shape; the rows before are known by `name`."""
        normed = self.norm(x_bth)
        (shifted,) = mixtures(normed, past.rows_before(name, normed, 1), self.mu[None, None, None])
        return shifted


class RWKVMixer(Mixer):
    """Base: every feature of a head has an input of its own, mixed from a token and the one before."""

    shifts_tokens = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.r_proj, self.k_proj, self.v_proj = (self.projection() for _ in range(3))
        self.group_norm_weight, self.group_norm_bias = (self.of_channels() for _ in range(2))
        self.add_parameters()
        self.out_proj = self.linear(self.num_heads * self.head_dim, self.hidden_size)

    def add_parameters(self) -> None:
        """Add the parameters that a mixer has beside these."""
        raise NotImplementedError

    def projection(self) -> nn.Parameter:
        """From the hidden state to the heads, [u, d, h]."""
        return self.parameter(self.num_heads, self.head_dim, self.hidden_size)

    def of_channels(self) -> nn.Parameter:
        """A number for each channel of each head, [u, d]."""
        return self.parameter(self.num_heads, self.head_dim)

    def narrow(self, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
        """Two matrices through a narrow middle: down [r, h] and up [u, d, r]."""
        return self.parameter(rank, self.hidden_size), self.parameter(self.num_heads, self.head_dim, rank)

    def normed_heads(self, o_btud: Tensor) -> Tensor:
        """Each head's output over its own mean and spread, fp32."""
        normed = F.layer_norm(o_btud.float(), o_btud.shape[-1:], eps=self.head_dim * self.epsilon)
        return normed * self.group_norm_weight.float() + self.group_norm_bias.float()


def to_heads(x_bth: Tensor, weight_udh: Tensor) -> Tensor:
    """From the hidden state, or a few numbers made of it, to the heads, [b, t, u, d]."""
    return F.linear(x_bth, weight_udh.flatten(0, 1)).unflatten(-1, weight_udh.shape[:2])


class RWKV6(RWKVMixer):
    """Finch's time mixing (Peng et al. 2024, arXiv 2404.05892); `mu` is of decay, key, value, receptance, gate."""

    def add_parameters(self) -> None:
        """See `RWKVMixer.add_parameters`."""
        hidden, mix_rank = self.hidden_size, self.settings.mix_rank
        self.mu_of_mixing, self.mu = self.parameter(hidden), self.parameter(5, hidden)
        self.mix_down, self.mix_up = self.parameter(5, mix_rank, hidden), self.parameter(5, hidden, mix_rank)
        self.g_proj = self.projection()
        self.decay_down, self.decay_up = self.narrow(self.settings.decay_rank)
        self.decay_base, self.bonus = self.of_channels(), self.of_channels()

    def forward(self, x_bth: Tensor, past: Beginning, positions: Positions) -> Tensor:
        """See `Mixer.forward`."""
        w, k, v, r, g = self._inputs(x_bth, past.rows_before("hidden_states", x_bth, 1))
        of_decay = to_heads(F.linear(w, self.decay_down).tanh(), self.decay_up)
        r, k, v, g = map(to_heads, (r, k, v, g), (self.r_proj, self.k_proj, self.v_proj, self.g_proj))
        log_decay = -(self.decay_base.float() + of_decay.float()).exp()
        read, state = rwkv6(r, k, v, log_decay, self.bonus, past.state("state"))
        past.keep_state("state", state)
        gated = self.normed_heads(read.to(x_bth.dtype)) * F.silu(g.float())
        projected: Tensor = self.out_proj(gated.to(x_bth.dtype).flatten(2))
        return projected

    def _inputs(self, x_bth: Tensor, before_b1h: Tensor) -> tuple[Tensor, ...]:
        """The five mixtures, [b, t, h] each."""
        (mixed,) = mixtures(x_bth, before_b1h, self.mu_of_mixing[None, None, None])
        chosen = torch.einsum("bth,irh->ibtr", mixed, self.mix_down).tanh()
        more = torch.einsum("ibtr,ihr->ibth", chosen, self.mix_up)
        return mixtures(x_bth, before_b1h, self.mu[:, None, None] + more)


class RWKV7(RWKVMixer):
    """Goose's time mixing (Peng et al. 2025, arXiv 2503.14456), every layer as the paper's first.

    `mu` is of receptance, decay, key, value, learning rate, gate.
    """

    def add_parameters(self) -> None:
        """See `RWKVMixer.add_parameters`."""
        for_head, chosen = 2.5 * self.head_dim / 64, self.settings
        self.mu = self.parameter(6, self.hidden_size)
        self.decay_down, self.decay_up = self.narrow(chosen.decay_rank or self._rank(for_head))
        self.rate_down, self.rate_up = self.narrow(chosen.rate_rank or self._rank(for_head))
        self.gate_down, self.gate_up = self.narrow(chosen.gate_rank or self._rank(5))
        self.decay_base, self.rate_base, self.removal_scale = (self.of_channels() for _ in range(3))
        self.key_rate, self.bonus = self.of_channels(), self.of_channels()

    def _rank(self, factor: float) -> int:
        return max(32, round(factor * math.sqrt(self.hidden_size) / 32) * 32)

    def forward(self, x_bth: Tensor, past: Beginning, positions: Positions) -> Tensor:
        """See `Mixer.forward`."""
        share = self.mu[:, None, None]
        r, w, k, v, a, g = mixtures(x_bth, past.rows_before("hidden_states", x_bth, 1), share)
        of_decay = to_heads(F.linear(w, self.decay_down).tanh(), self.decay_up)
        of_rate = to_heads(F.linear(a, self.rate_down), self.rate_up)
        gate = to_heads(F.linear(g, self.gate_down).sigmoid(), self.gate_up)
        r, k, v = map(to_heads, (r, k, v), (self.r_proj, self.k_proj, self.v_proj))
        log_decay = LEAST_LOG_DECAY * (self.decay_base.float() + of_decay.float()).sigmoid()
        rate = (self.rate_base.float() + of_rate.float()).sigmoid()
        removed = F.normalize(k.float() * self.removal_scale.float(), dim=-1)
        k = k.float() * (1 + (rate - 1) * self.key_rate.float())
        k, removing, added = (x.to(v.dtype) for x in (k, -removed, removed * rate))
        read, state = rwkv7(r, k, v, log_decay, removing, added, past.state("state"))
        past.keep_state("state", state)
        bonus = (r.float() * k.float() * self.bonus.float()).sum(-1, keepdim=True) * v.float()
        gated = (self.normed_heads(read.to(x_bth.dtype)) + bonus) * gate.float()
        projected: Tensor = self.out_proj(gated.to(x_bth.dtype).flatten(2))
        return projected
