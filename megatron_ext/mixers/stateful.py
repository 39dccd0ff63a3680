"""What the mixers with a state a head have in common: heads as units, the norm and the gate of a head's output."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from megatron_ext.mixers.base import Mixer, Part, batch_first
from megatron_ext.parallel.parameters import new_parameter, ones


def walk(
    op: Callable[..., Any],
    q_tbud: Tensor,
    k_tbud: Tensor,
    v_tbue: Tensor,
    *more_tbu: Tensor | None,
    part: Part,
    scale: float | None = None,
) -> Tensor:
    """What each token reads from its head's state, [t, b, heads, e].

    Args:
        op: a stateful op of `kernels`; its inputs follow, sequence first.
        q_tbud: queries [t, b, heads, d].
        k_tbud: keys.
        v_tbue: values [t, b, heads, e].
        more_tbu: what else it takes, such as decays.
        part: which part these are, and the past that the state before them comes from.
        scale: of the op.
    """
    q, k, v = (batch_first(x) for x in (q_tbud, k_tbud, v_tbue))
    more = [x if x is None else batch_first(x) for x in more_tbu]

    def from_state(values: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return op(q, k, values, *more, scale=scale, initial_state=state, return_final_state=True)

    return batch_first(part.past.walk("state", from_state, v, q.shape[-1]))


class StatefulMixer(Mixer):
    """Base of mixers whose unit is a head with its own query, key, value and state.

    Rows of the input projection begin with [query | key | value | output gate], the gate only where the mixer's
    configuration has `output_gate`; what a mixer adds comes behind. Its configuration also has `expand_v`.
    """

    hands_on_states: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_parameters()
        self.norm_weight = new_parameter((self.value_dim,), ones, dtype=self.config.params_dtype)

    def add_parameters(self) -> None:
        """Add the parameters that a mixer has beside its projections and its norm."""

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim * self.mixer_config.expand_v

    @property
    def qkv_width(self) -> int:
        """Features of a head's query, key and value."""
        return 2 * self.head_dim + self.value_dim

    @property
    def gate_width(self) -> int:
        """Features of a head's output gate."""
        return self.value_dim if self.mixer_config.output_gate else 0

    def num_units(self) -> int:
        """Heads."""
        return self.config.num_attention_heads

    def unit_width(self) -> int:
        """Query, key, value and output gate of a head."""
        return self.qkv_width + self.gate_width

    def output_width(self) -> int:
        """A head's output."""
        return self.value_dim

    def mix(self, x_tbuw: Tensor, part: Part) -> Tensor:
        """See `Mixer.mix`: walk over the states, gated norm."""
        widths = [self.qkv_width, self.gate_width]
        qkv, gate, rest = x_tbuw.split([*widths, x_tbuw.shape[-1] - sum(widths)], -1)
        return self._gated_norm(self.read_states(qkv, rest, part), gate)

    @abstractmethod
    def read_states(self, qkv_tbuw: Tensor, rest_tbuw: Tensor, part: Part) -> Tensor:
        """What each token reads from its head's state.

        Args:
            qkv_tbuw: [t, b, units, qkv_width]; see `split_heads`.
            rest_tbuw: what a mixer adds to the rows, [t, b, units, width].
            part: which units these are.

        Returns:
            [t, b, units, value_dim].
        """

    def split_heads(self, qkv_tbuw: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values."""
        return qkv_tbuw.split([self.head_dim, self.head_dim, self.value_dim], -1)

    def summary_size(self) -> int:
        """See `Mixer.summary_size`."""
        return self.head_dim * (self.head_dim + self.value_dim)

    def mixing_flops(self, seq_length: int) -> float:
        """Writing to the state and reading from it."""
        return self.num_units() * 4 * self.head_dim * self.value_dim

    def _gated_norm(self, o_tbud: Tensor, gate_tbud: Tensor) -> Tensor:
        """RMSNorm of each head's output [t, b, u, value_dim], times SiLU of its gate where there is one."""
        weight = self.replicated(self.norm_weight)
        normed = F.rms_norm(o_tbud.float(), (self.value_dim,), weight.float(), self.config.layernorm_epsilon)
        if self.mixer_config.output_gate:
            normed = normed * F.silu(gate_tbud.float())
        return normed.to(o_tbud.dtype)
