"""DeltaNet and gated DeltaNet: a recurrent state updated by the delta rule.

DeltaNet: Yang, Wang, Zhang, Shen, Kim 2024 (arXiv 2406.06484). Gated DeltaNet adds a decay: Yang, Kautz, Hatamizadeh
2024 (arXiv 2412.06464).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels.common.fusion import cut, fused
from kernels.gated_delta_rule import gated_delta_rule
from kernels.short_convolution import short_convolution
from megatron_ext.mixers.core.base import MixInput, batch_first
from megatron_ext.mixers.core.convolution import previous_rows
from megatron_ext.mixers.core.decay import inverse_softplus_step, log_uniform_decay_from_zero
from megatron_ext.mixers.core.registry import register
from megatron_ext.mixers.core.settings import DeltaNetConfig, GatedDeltaNetConfig
from megatron_ext.mixers.core.stateful import StatefulMixer, scan
from megatron_ext.parallel.parameters import uniform_within


@register("deltanet")
class DeltaNet(StatefulMixer):
    """DeltaNet; the head group is a head with its own query, key, value, output gate and beta.

    Rows of the input projection, per head: [query | key | value | output gate | beta].
    """

    mixer_config: DeltaNetConfig

    def add_parameters(self) -> None:
        """Create each head's convolution, initialised as torch does."""
        kernel = self.mixer_config.conv_kernel_size
        self.conv_weight = self.new_parameter_of_head_groups(uniform_within(kernel**-0.5), self.qkv_width, kernel)

    def head_group_width(self) -> int:
        """Return the width of a head's query, key, value, output gate and beta together."""
        return super().head_group_width() + 1

    def read_states(self, x_tbuw: Tensor, part: MixInput) -> tuple[Tensor, Tensor]:
        """Implement `StatefulMixer.read_states`: short convolution, delta rule."""
        num_scalars = self.head_group_width() - sum(self.head_widths)
        qkv, gate, scalars = cut(x_tbuw, [self.qkv_width, self.gate_width, num_scalars])
        weight = self.own_head_groups(self.conv_weight, part)
        before, unit_length = previous_rows(qkv, weight, part.history), (True, True, False)
        q, k, v = short_convolution(qkv, before, weight, widths=self.head_widths[:3], unit_length=unit_length)
        decay, beta = self.compute_log_decay(scalars, part), write_strengths(scalars[..., 0])
        return scan(gated_delta_rule, q, k, v, decay, beta, part=part), batch_first(gate)

    def compute_log_decay(self, scalars_tbuw: Tensor, part: MixInput) -> Tensor | None:
        """Compute the state's log decay [b, t, head groups], <= 0, fp32, from the rows' scalars; None: no decay."""
        return None

    def mixing_flops(self, seq_length: int) -> float:
        """Count the update of the state and the read from it: three products of key and value width."""
        return self.num_head_groups() * 6 * self.head_dim * self.value_dim


@register("gated_deltanet")
class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet: DeltaNet with a decay per head.

    Rows of the input projection, per head: [query | key | value | output gate | beta | alpha].
    """

    mixer_config: GatedDeltaNetConfig

    def add_parameters(self) -> None:
        """Create the convolution, decay and step bias of each head."""
        super().add_parameters()
        self.log_decay = self.new_parameter_of_head_groups(log_uniform_decay_from_zero, in_fp32=True)
        self.step_bias = self.new_parameter_of_head_groups(inverse_softplus_step, in_fp32=True)

    def head_group_width(self) -> int:
        """Return the width of a head's query, key, value, output gate, beta and alpha together."""
        return super().head_group_width() + 1

    def compute_log_decay(self, scalars_tbuw: Tensor, part: MixInput) -> Tensor:
        """Compute the log decay with `gated_log_decay`."""
        return gated_log_decay(
            scalars_tbuw[..., 1], self.own_head_groups(self.step_bias, part), self.own_head_groups(self.log_decay, part)
        )


@fused
def write_strengths(beta_tbu: Tensor) -> Tensor:
    """Compute each token's write strength, sigmoid(beta): [b, t, u], fp32."""
    return batch_first(beta_tbu).float().sigmoid().contiguous()


@fused
def gated_log_decay(alpha_tbu: Tensor, step_bias_u: Tensor, log_decay_u: Tensor) -> Tensor:
    """Compute the log decay -A softplus(alpha + bias): [b, t, u], fp32."""
    step = F.softplus(batch_first(alpha_tbu).float() + step_bias_u.float())
    return (-log_decay_u.float().exp() * step).contiguous()
