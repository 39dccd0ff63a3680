"""Mamba-2: a state a head with a step and a decay of each token's choice (Dao, Gu 2024, arXiv 2405.21060)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from kernels.gated_linear_attention import gated_linear_attention
from megatron_ext.config.schema import STRICT
from megatron_ext.mixers.base import Mixer, Part
from megatron_ext.mixers.convolution import causal_convolution
from megatron_ext.mixers.decay import inverse_softplus_step, log_uniform_decay
from megatron_ext.mixers.registry import register
from megatron_ext.mixers.stateful import walk
from megatron_ext.parallel.parameters import ones, uniform_within


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Mamba2Config:
    """Mamba-2.

    Attributes:
        state_size: width of B and C, which write to the state and read from it.
        expand: width of a head's value over head_dim.
        conv_kernel_size: positions, the own one included, that the short causal convolution over x, B and C sees.
        convolution: whether there is that convolution; SiLU follows either way.
        decay: what a head's step and decay are: of each token's choice; fixed, one learned step for every token; or
            none, where the state only adds x as it is.
        group_norm: whether an RMSNorm over the heads of a group follows the gate.
    """

    state_size: PositiveInt = 128
    expand: PositiveInt = 2
    conv_kernel_size: PositiveInt = 4
    convolution: bool = True
    decay: Literal["data_dependent", "fixed", "none"] = "data_dependent"
    group_norm: bool = True


@register("mamba2", Mamba2Config)
class Mamba2(Mixer):
    """Mamba-2; its unit is a query group, whose heads share B and C as in one of Mamba-2's own groups.

    Rows of the input projection, per group: [x of its heads | B | C | gate z of its heads | step of its heads], the
    step only where the decay depends on the data.

    Suffixes: u group, h head of a group, d value dim, n state dim, w width of what a group has.
    """

    hands_on_states: ClassVar[bool] = True
    units_are_groups: ClassVar[bool] = True
    mixer_config: Mamba2Config

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        heads, kernel = self.heads_per_group, self.mixer_config.conv_kernel_size
        if self.mixer_config.convolution:
            self.conv_weight = self.new_parameter_of_units(uniform_within(kernel**-0.5), self.conv_width, kernel)
            self.conv_bias = self.new_parameter_of_units(uniform_within(kernel**-0.5), self.conv_width)
        if self.mixer_config.decay != "none":
            self.log_decay = self.new_parameter_of_units(log_uniform_decay, heads)
            self.step_bias = self.new_parameter_of_units(inverse_softplus_step, heads)
        self.skip = self.new_parameter_of_units(ones, heads)
        if self.mixer_config.group_norm:
            self.group_norm_weight = self.new_parameter_of_units(ones, self.output_width())

    @property
    def heads_per_group(self) -> int:
        """Heads that share B and C."""
        return self.config.num_attention_heads // self.config.num_query_groups

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.head_dim * self.mixer_config.expand

    @property
    def conv_width(self) -> int:
        """Features of a group's x, B and C."""
        return self.output_width() + 2 * self.mixer_config.state_size

    @property
    def step_width(self) -> int:
        """Features of a group's steps."""
        return self.heads_per_group if self.mixer_config.decay == "data_dependent" else 0

    def num_units(self) -> int:
        """Query groups."""
        return self.config.num_query_groups

    def unit_width(self) -> int:
        """The group's x, B, C, gate and steps."""
        return self.conv_width + self.output_width() + self.step_width

    def output_width(self) -> int:
        """One output for each head of the group."""
        return self.heads_per_group * self.value_dim

    def mix(self, x_tbuw: Tensor, part: Part) -> Tensor:
        """See `Mixer.mix`: short convolution, walk over the states, skip, gate, norm."""
        width, state = self.output_width(), self.mixer_config.state_size
        xbc, gate, step = x_tbuw.split([self.conv_width, width, self.step_width], -1)
        x, b_tbun, c_tbun = F.silu(self._convolved(xbc, part)).split([width, state, state], -1)
        x_tbuhd = x.unflatten(-1, (self.heads_per_group, self.value_dim))
        y = self._read_states(x_tbuhd, b_tbun, c_tbun, step, part).float()
        y = y + self.own_units(self.skip, part).float()[..., None] * x_tbuhd.float()
        return self._normed(y.flatten(-2) * F.silu(gate.float()), part).to(x_tbuw.dtype)

    def _convolved(self, xbc_tbuw: Tensor, part: Part) -> Tensor:
        if not self.mixer_config.convolution:
            return xbc_tbuw
        weight, bias = (self.own_units(p, part) for p in (self.conv_weight, self.conv_bias))
        return causal_convolution(xbc_tbuw, weight, part.past) + bias

    def _read_states(self, x_tbuhd: Tensor, b_tbun: Tensor, c_tbun: Tensor, step_tbuh: Tensor, part: Part) -> Tensor:
        """What each token reads from its head's state, [t, b, u, h, d]: S <- e^g S + B (step x)^T;  S^T C."""
        v_tbuhd, decays = x_tbuhd, []
        if self.mixer_config.decay != "none":
            step = self._steps(step_tbuh, x_tbuhd, part)
            v_tbuhd = (step[..., None] * x_tbuhd.float()).to(x_tbuhd.dtype)
            decays = [(-self.own_units(self.log_decay, part).float().exp() * step).flatten(2)]
        k, q = (y.repeat_interleave(self.heads_per_group, 2) for y in (b_tbun, c_tbun))
        o = walk(gated_linear_attention, q, k, v_tbuhd.flatten(2, 3), *decays, part=part, scale=1.0)
        return o.unflatten(2, (-1, self.heads_per_group))

    def _steps(self, step_tbuh: Tensor, x_tbuhd: Tensor, part: Part) -> Tensor:
        """Step sizes [t, b, u, h], fp32; one a head, the same for every token, where the decay is fixed."""
        bias_uh = self.own_units(self.step_bias, part).float()
        if self.mixer_config.decay == "fixed":
            return F.softplus(bias_uh).expand(x_tbuhd.shape[:4])
        return F.softplus(step_tbuh.float() + bias_uh)

    def _normed(self, y_tbuw: Tensor, part: Part) -> Tensor:
        """RMSNorm over all heads of a group together, after the gate."""
        if not self.mixer_config.group_norm:
            return y_tbuw
        normed = F.rms_norm(y_tbuw, y_tbuw.shape[-1:], eps=self.config.layernorm_epsilon)
        return normed * self.own_units(self.group_norm_weight, part).float()

    def summary_size(self) -> int:
        """See `Mixer.summary_size`."""
        state = self.mixer_config.state_size
        return self.heads_per_group * state * (state + self.value_dim)

    def mixing_flops(self, seq_length: int) -> float:
        """Writing to the state, reading from it, and the convolution."""
        state = self.heads_per_group * 4 * self.mixer_config.state_size * self.value_dim
        taps = self.mixer_config.conv_kernel_size if self.mixer_config.convolution else 0
        return self.num_units() * (state + 2 * taps * self.conv_width)
