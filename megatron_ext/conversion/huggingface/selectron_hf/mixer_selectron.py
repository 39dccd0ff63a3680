"""Base class of the mixers, and shared operations: rotary positions, short convolution, norms of heads.

Shape suffixes: b batch, t position, h hidden, u head group (a head or a query group), n head, d and w width, k tap, i
mixture.
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

from .cache_selectron import EmptyHistory
from .configuration_selectron import SelectronConfig

P = ParamSpec("P")
R = TypeVar("R")

LENGTH_EPSILON = 1e-6
"""Added to the squared length of a vector before the division by its length."""


class Positions:
    """Positions of the rows of a call in their sequence, and the rotary embedding at these positions.

    Args:
        first: position of the first row.
        count: number of rows.
        config: configuration of the model, for the rotary frequencies.
    """

    def __init__(self, first: int, count: int, config: SelectronConfig) -> None:
        self.first, self.count = first, count
        self._width, self._base = config.head_dim, config.rope_theta
        self._rotations: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def rotate(self, x_btnd: Tensor) -> Tensor:
        """Apply rotary position embedding, pairing channel i with channel i + d / 2.

        Args:
            x_btnd: queries or keys [b, t, n, d].

        Returns:
            [b, t, n, d] in the dtype of x; computed in fp32.
        """
        cos_t1d, sin_t1d = self._rotation(x_btnd.device)
        left, right = x_btnd.float().chunk(2, -1)
        rotated = torch.cat([left * cos_t1d - right * sin_t1d, right * cos_t1d + left * sin_t1d], -1)
        return rotated.to(x_btnd.dtype)

    def _rotation(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._rotations:
            positions = torch.arange(self.first, self.first + self.count, device=device, dtype=torch.float32)
            angles = torch.outer(positions, frequencies(self._width, self._base).to(device))[:, None]
            self._rotations[device] = (angles.cos(), angles.sin())
        return self._rotations[device]


def frequencies(width: int, base: float) -> Tensor:
    """Return the angle per position of each pair of channels, fp32 [width / 2].

    They are computed on the CPU in the same order of operations as in transformers. Another order rounds differently,
    which changes the angles at positions in the thousands by 1e-3.
    """
    return 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32) / width))


class Mixer(nn.Module, ABC):
    """Base class of every mixer, which takes the place of self-attention in a layer.

    Args:
        config: configuration of the model.
        name: name of the mixer.
        layer_number: number of the layer; the first layer is 1.
    """

    shifts_tokens = False
    """True if the mixer itself interpolates each token's hidden state with that of the previous token."""

    def __init__(self, config: SelectronConfig, name: str, layer_number: int) -> None:
        super().__init__()
        self.settings = SimpleNamespace(**config.mixers[name])
        self.layer_number = layer_number
        self.hidden_size = config.hidden_size
        self.num_heads, self.num_groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.epsilon = config.norm_epsilon

    @abstractmethod
    def forward(self, x_bth: Tensor, history: EmptyHistory, positions: Positions) -> Tensor:
        """Mix the sequence.

        Args:
            x_bth: normalized hidden states [b, t, hidden].
            history: cache of the layer.
            positions: positions of the hidden states.

        Returns:
            [b, t, hidden].
        """

    def linear(self, in_features: int, out_features: int) -> nn.Linear:
        """Return a linear projection without bias."""
        return nn.Linear(in_features, out_features, bias=False)

    def parameter(self, *shape: int) -> nn.Parameter:
        """Return an uninitialized parameter."""
        return nn.Parameter(torch.empty(*shape))


def split_head_groups(x_btw: Tensor, head_groups: int, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Split projected features [b, t, head groups * sum of widths] into tensors [b, t, head groups, width].

    The features of a head group are next to each other.
    """
    return x_btw.unflatten(-1, (head_groups, -1)).split(list(widths), -1)


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it runs without autocast.

    Autocast would undo the explicit conversions to fp32. The function's first argument must be a tensor, whose device
    determines the autocast context.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        x = args[0]
        assert isinstance(x, Tensor), "the first argument must be a tensor"
        with torch.autocast(x.device.type, enabled=False):
            return function(*args, **kwargs)

    return call


@full_precision
def short_convolution(
    x_btuw: Tensor, previous_bkuw: Tensor, weight_uwk: Tensor, bias_uw: Tensor | None = None
) -> Tensor:
    """Return the SiLU of a depthwise causal convolution over positions, fp32 [b, t, u, w].

    Args:
        x_btuw: inputs [b, t, u, w].
        previous_bkuw: preceding inputs, [b, taps - 1, u, w].
        weight_uwk: taps [u, w, k]; the last tap applies to the current position.
        bias_uw: bias [u, w]; None: no bias.
    """
    t, taps = x_btuw.shape[1], weight_uwk.shape[-1]
    rows, weight = torch.cat([previous_bkuw, x_btuw], 1).float(), weight_uwk.float()
    y = rows[:, :t] * weight[..., 0]
    for tap in range(1, taps):
        y = y + rows[:, tap : tap + t] * weight[..., tap]
    return F.silu(y if bias_uw is None else y + bias_uw.float())


def l2_normalize(x: Tensor) -> Tensor:
    """Return the vectors of the last dimension divided by their length."""
    return x * (x.square().sum(-1, keepdim=True) + LENGTH_EPSILON).rsqrt()


def gated_norm(o_btue: Tensor, gate_btue: Tensor | None, weight_e: Tensor, epsilon: float) -> Tensor:
    """Return the RMSNorm of each head's output, times the SiLU of its gate if there is one.

    Computed in fp32 and returned as [b, t, u, e] in the dtype of the output.
    """
    normed = F.rms_norm(o_btue.float(), weight_e.shape, weight_e.float(), epsilon)
    if gate_btue is not None:
        normed = normed * F.silu(gate_btue.float())
    return normed.to(o_btue.dtype)


def mix_with_previous(x_bth: Tensor, previous_b1h: Tensor, weight_ibth: Tensor) -> tuple[Tensor, ...]:
    """Return interpolations of each token with the previous one, x_t + (x_{t-1} - x_t) * weight, [b, t, h] each.

    Args:
        x_bth: hidden states [b, t, h].
        previous_b1h: hidden state before the first of them, [b, 1, h].
        weight_ibth: weight of the previous token in each mixture, broadcastable to [i, b, t, h].
    """
    difference = torch.cat([previous_b1h, x_bth[:, :-1]], 1) - x_bth
    return tuple(x_bth + difference * weight for weight in weight_ibth.unbind())
