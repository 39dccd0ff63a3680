"""Mixers with one recurrent state per head: linear attention, RetNet, GLA, Based, DeltaNet and Gated DeltaNet.

Shape suffixes: b batch, t position, u head, d key dim, e value dim, f feature dim, w width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache_selectron import EmptyHistory
from .mixer_selectron import Mixer, Positions, gated_norm, l2_normalize, short_convolution, split_head_groups
from .states_selectron import delta_rule, linear_attention

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "identity": lambda x: x,
}


class StatefulMixer(Mixer):
    """Base class of mixers with one recurrent state per head.

    The rows of the input projection are, for each head, [query | key | value | output gate | scalars].
    """

    num_scalars = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.value_dim = self.head_dim * self.settings.expand_v
        gate = self.value_dim if self.settings.output_gate else 0
        self.widths = [self.head_dim, self.head_dim, self.value_dim, gate, self.num_scalars]
        self.in_proj = self.linear(self.hidden_size, self.num_heads * sum(self.widths))
        self.add_parameters()
        self.norm_weight = self.parameter(self.value_dim)
        self.out_proj = self.linear(self.num_heads * self.value_dim, self.hidden_size)

    def add_parameters(self) -> None:
        """Create the parameters that a mixer has in addition to its projections and its norm."""

    @abstractmethod
    def run_states(
        self, heads: tuple[Tensor, ...], x_bth: Tensor, history: EmptyHistory, positions: Positions
    ) -> Tensor:
        """Return the output of each head's state for each token, [b, t, u, e].

        Args:
            heads: query, key, value, gate and scalars of each head, [b, t, u, width] each.
            x_bth: hidden states.
            history: cache of the layer.
            positions: positions of the hidden states.
        """

    def forward(self, x_bth: Tensor, history: EmptyHistory, positions: Positions) -> Tensor:
        """Implement `Mixer.forward`."""
        heads = split_head_groups(self.in_proj(x_bth), self.num_heads, self.widths)
        out = self.run_states(heads, x_bth, history, positions).to(x_bth.dtype)
        gate = heads[3] if self.settings.output_gate else None
        projected: Tensor = self.out_proj(gated_norm(out, gate, self.norm_weight, self.epsilon).flatten(2))
        return projected


def scan(history: EmptyHistory, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float) -> Tensor:
    """Compute linear attention from the cached state, and cache the final state.

    Args:
        history: cache of the layer.
        q: queries [b, t, u, d].
        k: keys [b, t, u, d].
        v: values [b, t, u, e].
        g: log decay [b, t, u, 1 or d]; None: no decay.
        scale: factor on q.

    Returns:
        fp32 [b, t, u, e].
    """
    decay = q.new_zeros(*q.shape[:3], 1) if g is None else g
    out, state = linear_attention(q, k, v, decay, history.state("state"), scale)
    history.store_state("state", state)
    return out


class LinearAttention(StatefulMixer):
    """Linear attention without decay."""

    def run_states(
        self, heads: tuple[Tensor, ...], x_bth: Tensor, history: EmptyHistory, positions: Positions
    ) -> Tensor:
        """Implement `StatefulMixer.run_states`."""
        q, k = (FEATURE_MAPS[self.settings.feature_map](x) for x in heads[:2])
        return scan(history, q, k, heads[2], None, self.head_dim**-0.5)


class RetNet(StatefulMixer):
    """RetNet: the state of head h decays by the fixed factor 1 - 2^(-5-h) per token (arXiv 2307.08621)."""

    def run_states(
        self, heads: tuple[Tensor, ...], x_bth: Tensor, history: EmptyHistory, positions: Positions
    ) -> Tensor:
        """Implement `StatefulMixer.run_states`."""
        q, k = (positions.rotate(x) for x in heads[:2])
        head_u = torch.arange(self.num_heads, device=q.device, dtype=torch.float32)
        # log1p is accurate for small x, where fp32 would round 1 - x.
        decay = torch.log1p(-torch.exp2(-5.0 - head_u))[:, None].expand(*q.shape[:3], 1)
        return scan(history, q, k, heads[2], decay, self.head_dim**-0.5)


class GLA(StatefulMixer):
    """Gated linear attention (arXiv 2312.06635): each key feature has its own decay.

    The decay is sigmoid(up(down(hidden)) + bias)^(1 / temperature).
    """

    def add_parameters(self) -> None:
        """Implement `StatefulMixer.add_parameters`."""
        rank = self.settings.decay_rank
        self.decay_down = self.parameter(rank, self.hidden_size)
        self.decay_up = self.parameter(self.num_heads, self.head_dim, rank)
        self.decay_bias = self.parameter(self.num_heads, self.head_dim)

    def run_states(
        self, heads: tuple[Tensor, ...], x_bth: Tensor, history: EmptyHistory, positions: Positions
    ) -> Tensor:
        """Implement `StatefulMixer.run_states`."""
        logits = F.linear(F.linear(x_bth, self.decay_down), self.decay_up.flatten(0, 1))
        logits = logits.unflatten(-1, self.decay_up.shape[:2]).float() + self.decay_bias.float()
        decay = F.logsigmoid(logits) / self.settings.decay_temperature
        q, k, v = heads[:3]
        return scan(history, q, k, v, decay, self.head_dim**-0.5)


class Based(Mixer):
    """Based (arXiv 2402.18668): linear attention with the Taylor expansion of the exponential to second order.

    The weight of a key is 1 + s + s^2 / 2 with s = q.k / sqrt(f).
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        feature_dim = self.settings.feature_dim
        self.widths = [feature_dim, feature_dim, self.head_dim]
        self.in_proj = self.linear(self.hidden_size, self.num_heads * sum(self.widths))
        self.out_proj = self.linear(self.num_heads * self.head_dim, self.hidden_size)

    def forward(self, x_bth: Tensor, history: EmptyHistory, positions: Positions) -> Tensor:
        """Implement `Mixer.forward`."""
        q, k, v = split_head_groups(self.in_proj(x_bth), self.num_heads, self.widths)
        # A 1 appended to the values gives the sum of the weights.
        sums = scan(history, taylor_features(q), taylor_features(k), F.pad(v.float(), (0, 1), value=1.0), None, 1.0)
        out = (sums[..., :-1] / sums[..., -1:]).to(x_bth.dtype)
        projected: Tensor = self.out_proj(out.flatten(2))
        return projected


def taylor_features(x_btuf: Tensor) -> Tensor:
    """Return fp32 features whose products are 1 + s + s^2 / 2, with s = x.y / sqrt(f).

    Each pair of input channels gives one feature, not two.
    """
    width = x_btuf.shape[-1]
    x = x_btuf.float() * width**-0.25
    pairs = [x.square() * 0.5**0.5]
    pairs += [x * x.roll(shift, -1) for shift in range(1, (width + 1) // 2)]
    if width % 2 == 0:
        left, right = x.chunk(2, -1)
        pairs.append(left * right)
    return torch.cat([x.new_ones(*x.shape[:-1], 1), x, *pairs], -1)


class DeltaNet(StatefulMixer):
    """DeltaNet: a write corrects the state towards the value (delta rule, arXiv 2406.06484). The scalars are [beta]."""

    num_scalars = 1

    def add_parameters(self) -> None:
        """Implement `StatefulMixer.add_parameters`."""
        self.conv_weight = self.parameter(self.num_heads, sum(self.widths[:3]), self.settings.conv_kernel_size)

    def run_states(
        self, heads: tuple[Tensor, ...], x_bth: Tensor, history: EmptyHistory, positions: Positions
    ) -> Tensor:
        """Implement `StatefulMixer.run_states`."""
        qkv = torch.cat(heads[:3], -1)
        previous = history.previous_rows("convolution", qkv, self.conv_weight.shape[-1] - 1)
        q, k, v = short_convolution(qkv, previous, self.conv_weight).split(self.widths[:3], -1)
        # Rounded to the dtype of the hidden states, although computed in fp32.
        q, k, v = (x.to(x_bth.dtype) for x in (l2_normalize(q), l2_normalize(k), v))
        strength, decay = heads[4][..., 0].float().sigmoid(), self.compute_log_decay(heads[4])
        out, state = delta_rule(q, k, v, decay, strength, history.state("state"))
        history.store_state("state", state)
        return out

    def compute_log_decay(self, scalars_btuw: Tensor) -> Tensor:
        """Return the log decay of the state, fp32 [b, t, u], at most 0."""
        return torch.zeros_like(scalars_btuw[..., 0], dtype=torch.float32)


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet (arXiv 2412.06464): DeltaNet with a decay per head. The scalars are [beta | alpha]."""

    num_scalars = 2

    def add_parameters(self) -> None:
        """Implement `StatefulMixer.add_parameters`."""
        super().add_parameters()
        self.log_decay = self.parameter(self.num_heads)
        self.step_bias = self.parameter(self.num_heads)

    def compute_log_decay(self, scalars_btuw: Tensor) -> Tensor:
        """Implement `DeltaNet.compute_log_decay` as -A softplus(alpha + bias)."""
        step = F.softplus(scalars_btuw[..., 1].float() + self.step_bias.float())
        return -self.log_decay.float().exp() * step
