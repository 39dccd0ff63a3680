"""Base class of RWKV-6 and RWKV-7: token shift, projections of shifted inputs, norm of a head's output."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_ext.config.traits import MixerTraits
from megatron_ext.mixers.core.base import Mixer, MixInput, batch_first
from megatron_ext.mixers.core.shapes import StateShape
from megatron_ext.mixers.core.token_shift import layers_left
from megatron_ext.parallel.exchange import copy_to_group
from megatron_ext.parallel.parameters import Initializer, constant, new_parameter, normal, zeros


class RWKVMixer(Mixer):
    """Base class of mixers whose head group is a head and whose features each have their own input.

    The inputs are mixtures of the hidden states of a token and the previous token (`token_shift`). Every
    tensor-parallel rank computes the mixtures from the whole sequence shard of its context-parallel rank, and projects
    them to its own heads. Where the authors' code (github.com/BlinkDL/RWKV-LM) computes an initial value from layer and
    channel, the same formula is used. The large matrices are normal, as in the rest of the model.

    Suffixes: h hidden, u head, d channel of a head, r rank of a low-rank projection, i index of the input.
    """

    traits: ClassVar[MixerTraits] = MixerTraits(supports_state_passing=True, shifts_tokens=True)

    num_features: ClassVar[int]
    """Number of feature vectors of width head_dim per head and token."""

    def build_input_projection(self, linear: type) -> None:
        """Create projections of receptance, key and value, and the output norm.

        The back-end's linear layer is not used, because all its features would have the same input.
        """
        self.r_proj, self.k_proj, self.v_proj = (self.new_projection() for _ in range(3))
        layer_share = self.layer_number / self.config.num_layers
        self.group_norm_weight = self.new_parameter_of_head_groups(constant(layer_share**0.7), self.head_dim)
        self.group_norm_bias = self.new_parameter_of_head_groups(zeros, self.head_dim)
        self.add_parameters()

    @abstractmethod
    def add_parameters(self) -> None:
        """Create the mixer's parameters besides those that `build_input_projection` creates."""

    @abstractmethod
    def project(self, x_tbh: Tensor, before_1bh: Tensor) -> tuple[Tensor, ...]:
        """Compute the features of the heads.

        Args:
            x_tbh: hidden states.
            before_1bh: hidden state of the position before the first.

        Returns:
            `num_features` tensors [t, b, u, d], each from its own projection. `mix` receives the first tensor as
            `x_tbuw` and the others as `MixInput.more`.
        """

    def features(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Implement `Mixer.features`."""
        if self.config.sequence_parallel:
            x_tbh = gather_from_sequence_parallel_region(hidden_states, group=self.tp_group)
        else:
            x_tbh = copy_to_group(hidden_states, self.tp_group)
        return self.project(x_tbh, self.history.previous_rows("hidden_states", x_tbh, 1))

    def num_head_groups(self) -> int:
        """Return the number of heads."""
        return self.config.num_attention_heads

    def head_group_width(self) -> int:
        """Return the width of all features of a head together."""
        return self.num_features * self.head_dim

    def output_width(self) -> int:
        """Return the width of a head's output."""
        return self.head_dim

    @property
    def depth(self) -> float:
        """Relative depth of the layer, from 0 for the first to 1 for the last."""
        return (self.layer_number - 1) / max(self.config.num_layers - 1, 1)

    @property
    def layers_left(self) -> float:
        """Fraction of the model's layers from this layer to the last; see `token_shift.layers_left`."""
        return layers_left(self.layer_number, self.config.num_layers)

    def new_projection(self) -> torch.nn.Parameter:
        """Return a new projection from the hidden state to the heads of this rank, [u, d, h]."""
        return self.new_parameter_of_head_groups(
            normal(self.config.init_method_std), self.head_dim, self.config.hidden_size
        )

    def new_replicated_parameter(
        self, start: Initializer, *shape: int, weight_decay: bool = True
    ) -> torch.nn.Parameter:
        """Return a new parameter replicated over tensor-parallel ranks, to be used through `replicated`."""
        return new_parameter(shape, start, dtype=self.config.params_dtype, weight_decay=weight_decay)

    def project_down(self, x_tbh: Tensor, down_rh: Tensor) -> Tensor:
        """Project hidden states to r features that all heads share: [t, b, r]."""
        return F.linear(x_tbh, self.replicated(down_rh))

    def to_heads(self, x_tbh: Tensor, weight_udh: Tensor) -> Tensor:
        """Project hidden states, or a low-rank projection of them, to the heads of this rank: [t, b, u, d]."""
        return F.linear(x_tbh, weight_udh.flatten(0, 1)).unflatten(-1, weight_udh.shape[:2])

    def own_group_norm(self, part: MixInput) -> tuple[Tensor, Tensor, float]:
        """Return weight, bias and epsilon for `normed_heads`.

        Epsilon is head_dim times the epsilon of the model's norms: 64e-5 for heads of width 64, as in the authors'
        code. (flash-linear-attention applies the factor head_dim in RWKV-7 but not in RWKV-6.)
        """
        weight, bias = (self.own_head_groups(p, part) for p in (self.group_norm_weight, self.group_norm_bias))
        return weight, bias, self.head_dim * self.config.layernorm_epsilon

    def state_shape(self) -> StateShape:
        """Implement `Mixer.state_shape`."""
        return StateShape(1, self.head_dim, self.head_dim)


def normed_heads(o_btud: Tensor, weight_ud: Tensor, bias_ud: Tensor, epsilon: float) -> Tensor:
    """Apply LayerNorm to each head's output, in fp32: [b, t, u, d] to [t, b, u, d]."""
    normed = F.layer_norm(batch_first(o_btud).float(), o_btud.shape[-1:], eps=epsilon)
    return normed * weight_ud.float() + bias_ud.float()


def channel_position(channel: Tensor) -> Tensor:
    """Map channels 0, 1, ... linearly to [0, 1]."""
    return channel / (len(channel) - 1)
