"""Mamba: a diagonal recurrent state per channel with data-dependent step, B and C.

Gu, Dao 2023 (arXiv 2312.00752).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.fusion import cut, fused
from kernels.common.linear import linear_to_fp32
from kernels.selective_scan import selective_scan
from kernels.short_convolution import short_convolution
from megatron_ext.config.traits import MixerTraits
from megatron_ext.mixers.core.base import Mixer, MixInput, batch_first
from megatron_ext.mixers.core.convolution import previous_rows
from megatron_ext.mixers.core.decay import inverse_softplus_step
from megatron_ext.mixers.core.registry import register
from megatron_ext.mixers.core.settings import MambaConfig
from megatron_ext.parallel.exchange import sum_over_ranks
from megatron_ext.parallel.parameters import normal, ones, uniform_within


@register("mamba")
class Mamba(Mixer):
    """Mamba; the head group is a head, here simply head_dim * expand channels of the layer.

    Rows of the input projection, per head: [x | gate z]. A token's B, C and low-rank input of the step sizes are
    projected from the channels of all heads, so ranks that hold different heads sum their partial products.

    Suffixes: u head, w channel of a head, n state, r output of a token's projection: dt_rank + 2 * state_size.
    """

    traits: ClassVar[MixerTraits] = MixerTraits(
        supports_state_passing=True, needs_all_head_groups=True, supports_document_masking=True
    )
    mixer_config: MambaConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        width, kernel, size = self.output_width(), self.mixer_config.conv_kernel_size, self.mixer_config.state_size
        self.conv_weight = self.new_parameter_of_head_groups(uniform_within(kernel**-0.5), width, kernel)
        self.conv_bias = self.new_parameter_of_head_groups(uniform_within(kernel**-0.5), width)
        initializer = normal(self.config.init_method_std)
        self.x_proj = self.new_parameter_of_head_groups(initializer, self.dt_rank + 2 * size, width)
        self.dt_proj = self.new_parameter_of_head_groups(uniform_within(self.dt_rank**-0.5), width, self.dt_rank)
        self.dt_bias = self.new_parameter_of_head_groups(inverse_softplus_step, width, in_fp32=True)
        self.A_log = self.new_parameter_of_head_groups(log_arange, width, size, in_fp32=True)
        self.A_log.no_weight_decay = True  # type: ignore[attr-defined]  # as in the authors' code
        self.D = self.new_parameter_of_head_groups(ones, width, in_fp32=True)

    @property
    def dt_rank(self) -> int:
        """Rank of the projection to the step sizes."""
        return self.mixer_config.dt_rank or -(-self.config.hidden_size // 16)

    def num_head_groups(self) -> int:
        """Return the number of heads."""
        return self.config.num_attention_heads

    def head_group_width(self) -> int:
        """Return the width of a head's channels and their gate together."""
        return 2 * self.output_width()

    def output_width(self) -> int:
        """Return the number of a head's channels."""
        return self.head_dim * self.mixer_config.expand

    def mix(self, x_tbuw: Tensor, part: MixInput) -> Tensor:
        """Implement `Mixer.mix`: short convolution, selective scan, gate."""
        x, z = cut(x_tbuw, [self.output_width()] * 2)
        weight, bias = (self.own_head_groups(p, part) for p in (self.conv_weight, self.conv_bias))
        before = previous_rows(x, weight, part.history)
        (x_btuw,) = short_convolution(x, before, weight, bias, widths=[self.output_width()])
        size = self.mixer_config.state_size
        low_btr, B_btn, C_btn = self._project_all_channels(x_btuw, part).split([self.dt_rank, size, size], -1)
        dt_bias = self.own_head_groups(self.dt_bias, part)
        dt_proj = self.own_head_groups(self.dt_proj, part)
        dt_logits = linear_to_fp32(low_btr.to(x.dtype), dt_proj.flatten(0, 1)).unflatten(-1, dt_proj.shape[:2])
        dt_btuw = step_sizes(dt_logits, dt_bias)
        return gated_output(self._scan(x_btuw, dt_btuw, B_btn, C_btn, part), z)

    def _scan(self, x_btuw: Tensor, dt_btuw: Tensor, B_btn: Tensor, C_btn: Tensor, part: MixInput) -> Tensor:
        """Run the selective scan and return the tokens' outputs, [b, t, u, w]."""
        A_log, D = (self.own_head_groups(p, part).float().flatten(0, 1) for p in (self.A_log, self.D))
        dt_btc = dt_btuw.flatten(2)
        inputs = (x_btuw.flatten(2), dt_btc, -A_log.exp(), B_btn, C_btn)

        def from_state(state: Tensor | None) -> tuple[Tensor, Tensor]:
            y_btc, last = selective_scan(*inputs, D=D, initial_state=state, output_final_state=True)
            assert last is not None
            return y_btc, last

        decay = (dt_btc.sum(1)[..., None] * inputs[2]).exp()
        return part.history.scan_diagonal("state", from_state, decay).unflatten(2, (part.num_head_groups, -1))

    def _project_all_channels(self, x_btuw: Tensor, part: MixInput) -> Tensor:
        """Project the layer's channels to [b, t, dt_rank + 2n], fp32, identical on all ranks of the layer."""
        # In fp32, as 16-bit rounding of the partial products would depend on the number of ranks.
        partial = linear_to_fp32(x_btuw.flatten(2), self.own_head_groups(self.x_proj, part).transpose(0, 1).flatten(1))
        total = sum_over_ranks(partial, self.tp_group)
        # After the all-to-all, context-parallel ranks hold different heads, too.
        return total if part.num_head_groups == self.num_head_groups_per_rank else sum_over_ranks(total, self.cp_group)

    def summary_size(self) -> int:
        """Implement `Mixer.summary_size`."""
        return 2 * self.output_width() * self.mixer_config.state_size

    def summary_scans(self) -> float:
        """Implement `Mixer.summary_scans`: one more scan, see `states.diagonal_state_before`."""
        return 1.0

    def mixing_flops(self, seq_length: int) -> float:
        """Count the state's decay, the write to it and the read from it."""
        return self.num_head_groups() * self.output_width() * 6 * self.mixer_config.state_size


@fused
def step_sizes(logits_btuw: Tensor, bias_uw: Tensor) -> Tensor:
    """Compute the step sizes [b, t, u, w], fp32."""
    return F.softplus(logits_btuw + bias_uw.float())


@fused
def gated_output(y_btuw: Tensor, gate_tbuw: Tensor) -> Tensor:
    """Multiply by SiLU of the gate: [t, b, u, w]."""
    return (batch_first(y_btuw).float() * F.silu(gate_tbuw.float())).to(gate_tbuw.dtype).contiguous()


def log_arange(whole: Tensor, _: torch.Generator) -> None:
    """Fill each channel with log(1), ..., log(n), n the last dimension: S4D-real (Gu et al. 2022, arXiv 2206.11893)."""
    whole.copy_(torch.arange(1.0, whole.shape[-1] + 1).log().expand_as(whole))
