"""Base class of mixers with one matrix-valued recurrent state per head, an output norm and an output gate."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from kernels.common.fusion import fused
from megatron_ext.config.traits import MixerTraits
from megatron_ext.mixers.core.base import Mixer, MixInput, batch_first
from megatron_ext.mixers.core.shapes import StateShape
from megatron_ext.parallel.parameters import new_parameter, ones


def scan(
    op: Callable[..., Any],
    q_bthd: Tensor,
    k_bthd: Tensor,
    v_bthe: Tensor,
    *more_bth: Tensor | None,
    part: MixInput,
    scale: float | None = None,
) -> Tensor:
    """Scan the positions of `part`, and return what each token reads from its head's state, [b, t, heads, e].

    Args:
        op: a stateful op of `kernels`. The next arguments are its inputs.
        q_bthd: queries [b, t, heads, d].
        k_bthd: keys [b, t, heads, d].
        v_bthe: values [b, t, heads, e].
        more_bth: further inputs of the op, such as decays.
        part: head groups and positions of the inputs; `part.history` provides the initial state.
        scale: scale argument of the op.
    """

    def from_state(values: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return op(q_bthd, k_bthd, values, *more_bth, scale=scale, initial_state=state, output_final_state=True)

    return part.history.scan("state", from_state, v_bthe, q_bthd.shape[-1])


class StatefulMixer(Mixer):
    """Base class of mixers whose head group is a head with its own query, key, value and state.

    The features of the input projection begin with [query | key | value | output gate], followed by those that a
    subclass adds. The mixer's configuration has the fields `output_gate` and `expand_v`. Without `output_gate`, there
    is no gate.
    """

    traits: ClassVar[MixerTraits] = MixerTraits(supports_state_passing=True, supports_document_masking=True)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_parameters()
        self.norm_weight = new_parameter((self.value_dim,), ones, dtype=self.config.params_dtype)

    def add_parameters(self) -> None:
        """Create the parameters that a mixer has besides its projections and its norm."""

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim * self.mixer_config.expand_v

    @property
    def qkv_width(self) -> int:
        """Width of a head's query, key and value together."""
        return 2 * self.head_dim + self.value_dim

    @property
    def gate_width(self) -> int:
        """Width of a head's output gate; 0 without one."""
        return self.value_dim if self.mixer_config.output_gate else 0

    def num_head_groups(self) -> int:
        """Return the number of heads."""
        return self.config.num_attention_heads

    def head_group_width(self) -> int:
        """Return the width of a head's query, key, value and output gate together."""
        return self.qkv_width + self.gate_width

    def output_width(self) -> int:
        """Return the width of a head's output."""
        return self.value_dim

    def mix(self, x_tbuw: Tensor, part: MixInput) -> Tensor:
        """Implement `Mixer.mix`: scan, gated norm."""
        read_btue, gate_btue = self.read_states(x_tbuw, part)
        gate = gate_btue if self.mixer_config.output_gate else None
        return gated_norm(read_btue, gate, self.replicated(self.norm_weight), self.config.layernorm_epsilon)

    @abstractmethod
    def read_states(self, x_tbuw: Tensor, part: MixInput) -> tuple[Tensor, Tensor]:
        """Return what each token reads from its head's state, and the token's output gate.

        Args:
            x_tbuw: projected features; see `head_widths`.
            part: head groups and positions of `x_tbuw`.

        Returns:
            [b, t, head groups, value_dim] and [b, t, head groups, gate_width].
        """

    @property
    def head_widths(self) -> list[int]:
        """Widths of a head's query, key, value and output gate."""
        return [self.head_dim, self.head_dim, self.value_dim, self.gate_width]

    def state_shape(self) -> StateShape:
        """Implement `Mixer.state_shape`."""
        return StateShape(1, self.head_dim, self.value_dim)

    def mixing_flops(self, seq_length: int) -> float:
        """Count the FLOPs of the write to the state and of the read from the state."""
        return self.num_head_groups() * 4 * self.head_dim * self.value_dim


@fused
def gated_norm(o_btue: Tensor, gate_btue: Tensor | None, weight_e: Tensor, epsilon: float) -> Tensor:
    """Apply RMSNorm to each head's output and multiply it by SiLU of the head's gate, if any, in fp32.

    Args:
        o_btue: head outputs [b, t, u, e].
        gate_btue: gates [b, t, u, e] or None.
        weight_e: weight of the norm, [e].
        epsilon: epsilon of the norm.

    Returns:
        [t, b, u, e] in the dtype of `o_btue`.
    """
    normed_btue = F.rms_norm(o_btue.float(), weight_e.shape, weight_e.float(), epsilon)
    if gate_btue is not None:
        normed_btue = normed_btue * F.silu(gate_btue.float())
    return batch_first(normed_btue.to(o_btue.dtype)).contiguous()
