"""What every mixer is given, and what many have in common: rotary positions, short convolution, norms of heads.

Suffixes: b batch, t position, h hidden, u unit (a head, or a query group), n head, d and w width, k tap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache_selectron import Beginning
from .configuration_selectron import SelectronConfig

P = ParamSpec("P")
R = TypeVar("R")

LENGTH_EPSILON = 1e-6
"""Added to the square of a vector's length."""


class Positions:
    """Where the rows of a call stand in their sequence.

    Args:
        first: position of the first row.
        count: rows.
        config: of the model, for the rotation.
    """

    def __init__(self, first: int, count: int, config: SelectronConfig) -> None:
        self.first, self.count = first, count
        self._width, self._base = config.head_dim, config.rope_theta
        self._rotations: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def rotate(self, x_btnd: Tensor) -> Tensor:
        """Turn the pairs of each head's channels, halves paired; computed in fp32, returned in x's dtype."""
        cos_t1d, sin_t1d = self._rotation(x_btnd.device)
        left, right = x_btnd.float().chunk(2, -1)
        turned = torch.cat([left * cos_t1d - right * sin_t1d, right * cos_t1d + left * sin_t1d], -1)
        return turned.to(x_btnd.dtype)

    def _rotation(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._rotations:
            positions = torch.arange(self.first, self.first + self.count, device=device, dtype=torch.float32)
            angles = torch.outer(positions, frequencies(self._width, self._base).to(device))[:, None]
            self._rotations[device] = (angles.cos(), angles.sin())
        return self._rotations[device]


def frequencies(width: int, base: float) -> Tensor:
    """Angle a position of each pair of channels, [width / 2], fp32: on the CPU and in the order of transformers.

    Another order of the operations rounds otherwise, which thousands of positions make an angle that is off by 1e-3.
    """
    return 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32) / width))


class Mixer(nn.Module, ABC):
    """Base of every mixer; it stands in the place of self-attention.

    Args:
        config: of the model.
        name: of the mixer.
        layer_number: 1 for the first layer.
    """

    shifts_tokens = False
    """Whether the mixer mixes each token's hidden state with the one before by itself."""

    def __init__(self, config: SelectronConfig, name: str, layer_number: int) -> None:
        super().__init__()
        self.settings = SimpleNamespace(**config.mixers[name])
        self.layer_number = layer_number
        self.hidden_size = config.hidden_size
        self.num_heads, self.num_groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.epsilon = config.norm_epsilon

    @abstractmethod
    def forward(self, x_bth: Tensor, past: Beginning, positions: Positions) -> Tensor:
        """Mix the sequence.

        Args:
            x_bth: normed hidden states [b, t, hidden].
            past: what lies before them.
            positions: where they stand.

        Returns:
            [b, t, hidden].
        """

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        """A projection without a bias."""
        return nn.Linear(inputs, outputs, bias=False)

    def parameter(self, *shape: int) -> nn.Parameter:
        """A parameter that is still to be filled."""
        return nn.Parameter(torch.empty(*shape))


def cut_units(x_btw: Tensor, units: int, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Features that lie unit after unit, cut into a unit's parts: [b, t, units, width] each."""
    return x_btw.unflatten(-1, (units, -1)).split(list(widths), -1)


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: switch autocast off, which would undo the conversions to fp32 that a definition asks for."""

    @wraps(function)
    def call(*args: P.args, **more: P.kwargs) -> R:
        x = args[0]
        assert isinstance(x, Tensor), "the first argument says which device it is"
        with torch.autocast(x.device.type, enabled=False):
            return function(*args, **more)

    return call


@full_precision
def short_convolution(x_btuw: Tensor, before_bkuw: Tensor, weight_uwk: Tensor, bias_uw: Tensor | None = None) -> Tensor:
    """SiLU of a depthwise causal convolution over positions, fp32.

    Args:
        x_btuw: [b, t, u, w].
        before_bkuw: the rows before them, [b, taps - 1, u, w].
        weight_uwk: taps; the last one meets the own position.
        bias_uw: None for none.
    """
    t, taps = x_btuw.shape[1], weight_uwk.shape[-1]
    rows, weight = torch.cat([before_bkuw, x_btuw], 1).float(), weight_uwk.float()
    y = rows[:, :t] * weight[..., 0]
    for tap in range(1, taps):
        y = y + rows[:, tap : tap + t] * weight[..., tap]
    return F.silu(y if bias_uw is None else y + bias_uw.float())


def of_unit_length(x: Tensor) -> Tensor:
    """Vectors of the last dimension over their length."""
    return x * (x.square().sum(-1, keepdim=True) + LENGTH_EPSILON).rsqrt()


def gated_norm(o_btue: Tensor, gate_btue: Tensor | None, weight_e: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of each head's output, times SiLU of its gate where there is one, in fp32: [b, t, u, e]."""
    normed = F.rms_norm(o_btue.float(), weight_e.shape, weight_e.float(), epsilon)
    if gate_btue is not None:
        normed = normed * F.silu(gate_btue.float())
    return normed.to(o_btue.dtype)


def mixtures(x_bth: Tensor, before_b1h: Tensor, share_ibth: Tensor) -> tuple[Tensor, ...]:
    """Each token mixed with the one before it, in some ways: x_t + (x_{t-1} - x_t) * share, [b, t, h] each."""
    to_previous = torch.cat([before_b1h, x_bth[:, :-1]], 1) - x_bth
    return tuple(x_bth + to_previous * share for share in share_ibth.unbind())
