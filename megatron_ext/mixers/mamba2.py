"""Mamba-2: a matrix-valued state per head with data-dependent step and decay (Dao, Gu 2024, arXiv 2405.21060)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from kernels.common.fusion import cut, fused
from kernels.gated_linear_attention import gated_linear_attention
from kernels.short_convolution import short_convolution
from megatron_ext.config.traits import MixerTraits
from megatron_ext.mixers.core.base import Mixer, MixInput, batch_first
from megatron_ext.mixers.core.convolution import previous_rows
from megatron_ext.mixers.core.decay import inverse_softplus_step, log_uniform_decay
from megatron_ext.mixers.core.registry import register
from megatron_ext.mixers.core.settings import Mamba2Config
from megatron_ext.mixers.core.shapes import StateShape
from megatron_ext.mixers.core.stateful import scan
from megatron_ext.parallel.parameters import ones, uniform_within


@register("mamba2")
class Mamba2(Mixer):
    """Mamba-2; the head group is a query group, whose heads share B and C as in one of Mamba-2's groups.

    Rows of the input projection, per group: [x of its heads | B | C | gate z of its heads | step of its heads]. A
    step exists only if the decay is data-dependent.

    Suffixes: u group, h head of a group, d value dim, n state dim, w width of a group's features.
    """

    traits: ClassVar[MixerTraits] = MixerTraits(
        supports_state_passing=True, head_groups_are_query_groups=True, supports_document_masking=True
    )
    mixer_config: Mamba2Config

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        heads, kernel = self.heads_per_group, self.mixer_config.conv_kernel_size
        if self.mixer_config.convolution:
            self.conv_weight = self.new_parameter_of_head_groups(uniform_within(kernel**-0.5), self.conv_width, kernel)
            self.conv_bias = self.new_parameter_of_head_groups(uniform_within(kernel**-0.5), self.conv_width)
        if self.mixer_config.decay != "none":
            self.log_decay = self.new_parameter_of_head_groups(log_uniform_decay, heads, in_fp32=True)
            self.step_bias = self.new_parameter_of_head_groups(inverse_softplus_step, heads, in_fp32=True)
        self.skip = self.new_parameter_of_head_groups(ones, heads, in_fp32=True)
        if self.mixer_config.group_norm:
            self.group_norm_weight = self.new_parameter_of_head_groups(ones, self.output_width())

    @property
    def heads_per_group(self) -> int:
        """Number of heads that share B and C."""
        return self.config.num_attention_heads // self.config.num_query_groups

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.head_dim * self.mixer_config.expand

    @property
    def conv_width(self) -> int:
        """Width of a group's x, B and C together."""
        return self.output_width() + 2 * self.mixer_config.state_size

    @property
    def step_width(self) -> int:
        """Width of a group's steps."""
        return self.heads_per_group if self.mixer_config.decay == "data_dependent" else 0

    def num_head_groups(self) -> int:
        """Return the number of query groups."""
        return self.config.num_query_groups

    def head_group_width(self) -> int:
        """Return the width of a group's x, B, C, gate and steps together."""
        return self.conv_width + self.output_width() + self.step_width

    def output_width(self) -> int:
        """Return the width of the outputs of all heads of a group."""
        return self.heads_per_group * self.value_dim

    def mix(self, x_tbuw: Tensor, part: MixInput) -> Tensor:
        """Implement `Mixer.mix`: short convolution, scan, skip, gate, norm."""
        width = self.output_width()
        xbc, gate, step = cut(x_tbuw, [self.conv_width, width, self.step_width])
        x_btuw, b_btun, c_btun = self._convolve(xbc, part)
        x_btuhd = x_btuw.unflatten(-1, (self.heads_per_group, self.value_dim))
        y_btuhd = self._read_states(x_btuhd, b_btun, c_btun, step, part)
        norm_weight = self.own_head_groups(self.group_norm_weight, part) if self.mixer_config.group_norm else None
        skip_uh = self.own_head_groups(self.skip, part)
        return gated_output(y_btuhd, x_btuhd, skip_uh, gate, norm_weight, self.config.layernorm_epsilon)

    def _convolve(self, xbc_tbuw: Tensor, part: MixInput) -> tuple[Tensor, ...]:
        widths = [self.output_width(), self.mixer_config.state_size, self.mixer_config.state_size]
        if not self.mixer_config.convolution:
            return activate_and_split(xbc_tbuw, widths)
        weight, bias = (self.own_head_groups(p, part) for p in (self.conv_weight, self.conv_bias))
        return short_convolution(xbc_tbuw, previous_rows(xbc_tbuw, weight, part.history), weight, bias, widths=widths)

    def _read_states(
        self, x_btuhd: Tensor, b_btun: Tensor, c_btun: Tensor, step_tbuh: Tensor, part: MixInput
    ) -> Tensor:
        """Scan S <- e^g S + B (step x)^T and return the read-outs S^T C, [b, t, u, h, d]."""
        k, q = b_btun, c_btun
        if self.heads_per_group > 1:
            k, q = (y.repeat_interleave(self.heads_per_group, 2) for y in (k, q))
        v, decays = x_btuhd.flatten(2, 3), []
        if self.mixer_config.decay != "none":
            bias_uh, log_decay_uh = (self.own_head_groups(p, part) for p in (self.step_bias, self.log_decay))
            is_data_dependent = self.mixer_config.decay == "data_dependent"
            v, decay = values_and_log_decays(x_btuhd, step_tbuh if is_data_dependent else None, bias_uh, log_decay_uh)
            decays = [decay]
        o = scan(gated_linear_attention, q, k, v, *decays, part=part, scale=1.0)
        return o.unflatten(2, (-1, self.heads_per_group))

    def state_shape(self) -> StateShape:
        """Implement `Mixer.state_shape`."""
        return StateShape(self.heads_per_group, self.mixer_config.state_size, self.value_dim)

    def mixing_flops(self, seq_length: int) -> float:
        """Count the write to the state and the read from it."""
        return self.num_head_groups() * self.heads_per_group * 4 * self.mixer_config.state_size * self.value_dim


@fused
def activate_and_split(xbc_tbuw: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
    """Apply SiLU and split into x, B and C: [b, t, u, w] each."""
    return tuple(batch_first(y).contiguous() for y in cut(F.silu(xbc_tbuw), widths))


@fused
def values_and_log_decays(
    x_btuhd: Tensor, step_tbuh: Tensor | None, bias_uh: Tensor, log_decay_uh: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the written values, step * x [b, t, u * h, d], and the log decay -A * step [b, t, u * h], fp32.

    The step is softplus of the head's bias, plus the token's logit if there is one.
    """
    bias_uh = bias_uh.float()
    step = F.softplus(bias_uh if step_tbuh is None else batch_first(step_tbuh).float() + bias_uh)
    written = (step[..., None] * x_btuhd.float()).to(x_btuhd.dtype)
    decay = (-log_decay_uh.float().exp() * step).expand(x_btuhd.shape[:4])
    return written.flatten(2, 3).contiguous(), decay.flatten(2).contiguous()


@fused
def gated_output(
    y_btuhd: Tensor, x_btuhd: Tensor, skip_uh: Tensor, gate_tbuw: Tensor, norm_weight_uw: Tensor | None, epsilon: float
) -> Tensor:
    """Add the skip of x, multiply by SiLU of the gate, and apply RMSNorm over all heads of a group: [t, b, u, w].

    No norm is applied if `norm_weight_uw` is None.
    """
    y = y_btuhd.float() + skip_uh.float()[..., None] * x_btuhd.float()
    y_tbuw = batch_first(y.flatten(-2)) * F.silu(gate_tbuw.float())
    if norm_weight_uw is not None:
        y_tbuw = F.rms_norm(y_tbuw, y_tbuw.shape[-1:], eps=epsilon) * norm_weight_uw.float()
    return y_tbuw.to(gate_tbuw.dtype).contiguous()
