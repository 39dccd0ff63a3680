"""RWKV-6 (Finch): a recurrent state with data-dependent decay per key feature (Peng et al. 2024, arXiv 2404.05892)."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.fusion import fused
from kernels.rwkv6 import rwkv6
from megatron_ext.mixers.core.base import MixInput, batch_first
from megatron_ext.mixers.core.registry import register
from megatron_ext.mixers.core.rwkv import RWKVMixer, channel_position, normed_heads
from megatron_ext.mixers.core.settings import RWKV6Config
from megatron_ext.mixers.core.stateful import scan
from megatron_ext.mixers.core.token_shift import mixtures, ramp, ramps
from megatron_ext.parallel.parameters import Initializer, by_channel, uniform_within, zeros


@register("rwkv6")
class RWKV6(RWKVMixer):
    """RWKV-6's time mixing; see `RWKVMixer`.

    The share of the previous token in the mixtures is data-dependent, separately for decay, key, value, receptance and
    gate (the order of `mu`). Features of a head: receptance, key, value, decay logits, gate.
    """

    num_features: ClassVar[int] = 5
    mixer_config: RWKV6Config

    def add_parameters(self) -> None:
        """Create the parameters of mixtures, gate and decays, and the bonus of the current token."""
        hidden, mix_rank, decay_rank = self.config.hidden_size, self.mixer_config.mix_rank, self.mixer_config.decay_rank
        linear_ramp, steep_ramp = ramp(self.layers_left), ramp(0.5 * self.layers_left)
        values_ramp = ramp(self.layers_left, lowered=0.3 * self.depth)
        self.mu_of_mixing = self.new_replicated_parameter(linear_ramp, hidden, weight_decay=False)
        mu_initializer = ramps(linear_ramp, linear_ramp, values_ramp, steep_ramp, steep_ramp)
        self.mu = self.new_replicated_parameter(mu_initializer, 5, hidden, weight_decay=False)
        self.mix_down = self.new_replicated_parameter(zeros, 5, mix_rank, hidden)
        self.mix_up = self.new_replicated_parameter(uniform_within(0.01), 5, hidden, mix_rank)
        self.g_proj = self.new_projection()
        self.decay_down = self.new_replicated_parameter(zeros, decay_rank, hidden)
        self.decay_up = self.new_parameter_of_head_groups(uniform_within(0.01), self.head_dim, decay_rank)
        self.decay_base = self.new_parameter_of_head_groups(_initial_decay(self.depth), self.head_dim, in_fp32=True)
        self.bonus = self.new_parameter_of_head_groups(_initial_bonus(self.depth), self.head_dim)

    def project(self, x_tbh: Tensor, before_1bh: Tensor) -> tuple[Tensor, ...]:
        """Implement `RWKVMixer.project`."""
        w, k, v, r, g = self._inputs(x_tbh, before_1bh)
        decay_logits = self.to_heads(self.project_down(w, self.decay_down).tanh(), self.decay_up)
        r, k, v, g = map(self.to_heads, (r, k, v, g), (self.r_proj, self.k_proj, self.v_proj, self.g_proj))
        return r, k, v, decay_logits, g

    def _inputs(self, x_tbh: Tensor, before_1bh: Tensor) -> tuple[Tensor, ...]:
        """Compute the five mixtures, [t, b, h] each."""
        names = (self.mu_of_mixing, self.mu, self.mix_down, self.mix_up)
        mixing_mu_h, mu_ih, down_irh, up_ihr = (self.replicated(p) for p in names)
        (mixed_tbh,) = mixtures(x_tbh, before_1bh, mixing_mu_h[None])
        hidden_itbr = torch.einsum("tbh,irh->itbr", mixed_tbh, down_irh).tanh()
        offsets_itbh = torch.einsum("itbr,ihr->itbh", hidden_itbr, up_ihr)
        return mixtures(x_tbh, before_1bh, mu_ih, offsets_itbh)

    def mix(self, x_tbuw: Tensor, part: MixInput) -> Tensor:
        """Implement `Mixer.mix`: scan, norm, gate."""
        r, k, v, decay_logits, g = x_tbuw, *part.more
        base, bonus = (self.own_head_groups(p, part) for p in (self.decay_base, self.bonus))
        heads = scan_inputs(r, k, v, decay_logits, base)
        o = scan(partial(rwkv6, u=bonus.float()), *heads, part=part)
        return gated_output(o, g, *self.own_group_norm(part))

    def mixing_flops(self, seq_length: int) -> float:
        """Count the write to the state, the read from it, and the bonus of the current token."""
        return self.num_head_groups() * (4 * self.head_dim**2 + 5 * self.head_dim)


@fused
def scan_inputs(
    r_tbud: Tensor, k_tbud: Tensor, v_tbud: Tensor, decay_logits_tbud: Tensor, base_ud: Tensor
) -> tuple[Tensor, ...]:
    """Return receptances, keys, values and log decays (fp32): [b, t, u, d] each."""
    log_decay = -(base_ud.float() + decay_logits_tbud.float()).exp()
    return tuple(batch_first(x).contiguous() for x in (r_tbud, k_tbud, v_tbud, log_decay))


@fused
def gated_output(o_btud: Tensor, gate_tbud: Tensor, weight_ud: Tensor, bias_ud: Tensor, epsilon: float) -> Tensor:
    """Normalise each head's output and multiply by SiLU of its gate: [t, b, u, d]."""
    normed = normed_heads(o_btud, weight_ud, bias_ud, epsilon)
    return (normed * F.silu(gate_tbud.float())).to(gate_tbud.dtype).contiguous()


def _initial_decay(depth: float) -> Initializer:
    return by_channel(lambda channel: -6 + 5 * channel_position(channel) ** (0.7 + 1.3 * depth))


def _initial_bonus(depth: float) -> Initializer:
    return by_channel(lambda channel: depth * (1 - channel_position(channel)) + 0.1 * ((channel + 1) % 3 - 1))
