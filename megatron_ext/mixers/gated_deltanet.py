"""Gated DeltaNet: a stateful mixer with a gated delta rule (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464)."""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from kernels.gated_delta_rule import gated_delta_rule
from megatron_ext.config.schema import STRICT
from megatron_ext.mixers.base import Part, batch_first
from megatron_ext.mixers.convolution import causal_convolution, uniform_taps
from megatron_ext.mixers.decay import inverse_softplus_step, log_uniform_decay
from megatron_ext.mixers.registry import register
from megatron_ext.mixers.stateful import StatefulMixer


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GatedDeltaNetConfig:
    """Gated DeltaNet.

    Attributes:
        conv_kernel_size: positions, the own one included, that the short causal convolution over q, k and v sees.
        expand_v: width of a value head over that of a key head.
        output_gate: whether a SiLU gate follows the output norm.
    """

    conv_kernel_size: PositiveInt = 4
    expand_v: PositiveInt = 1
    output_gate: bool = True


@register("gated_deltanet", GatedDeltaNetConfig)
class GatedDeltaNet(StatefulMixer):
    """Gated DeltaNet; its unit is a head with its own query, key, value, gate, step and decay.

    Rows of the input projection, per head: [query | key | value | output gate | beta | alpha].
    """

    mixer_config: GatedDeltaNetConfig

    def add_parameters(self) -> None:
        """Convolution, decay and step of each head."""
        kernel = self.mixer_config.conv_kernel_size
        self.conv_weight = self.new_parameter_of_units(uniform_taps, self.qkv_width, kernel)
        self.log_decay = self.new_parameter_of_units(log_uniform_decay)
        self.step_bias = self.new_parameter_of_units(inverse_softplus_step)

    def unit_width(self) -> int:
        """Query, key, value, output gate, beta and alpha of a head."""
        return super().unit_width() + 2

    def read_states(self, qkv_tbuw: Tensor, rest_tbuw: Tensor, part: Part) -> Tensor:
        """See `StatefulMixer.read_states`: short convolution, gated delta rule."""
        beta, alpha = rest_tbuw.split([1, 1], -1)
        q, k, v = self.split_heads(F.silu(causal_convolution(qkv_tbuw, self.own_units(self.conv_weight, part))))
        q, k = (F.normalize(x.float(), dim=-1, eps=1e-6).to(v.dtype) for x in (q, k))
        o_bthd = gated_delta_rule(
            batch_first(q),
            batch_first(k),
            batch_first(v),
            batch_first(self._log_forgetting(alpha.squeeze(-1), part)),
            batch_first(beta.squeeze(-1).float().sigmoid()),
        )
        return batch_first(o_bthd)

    def _log_forgetting(self, alpha_tbu: Tensor, part: Part) -> Tensor:
        """Log decay of the state, <= 0, fp32: -A softplus(alpha + bias)."""
        bias, log_decay = (self.own_units(p, part).float() for p in (self.step_bias, self.log_decay))
        return -log_decay.exp() * F.softplus(alpha_tbu.float() + bias)

    def mixing_flops(self, seq_length: int) -> float:
        """State update and read-out (three products of key and value width) and the convolution."""
        state = 6 * self.head_dim * self.value_dim
        convolution = 2 * self.mixer_config.conv_kernel_size * self.qkv_width
        return self.num_units() * (state + convolution)
