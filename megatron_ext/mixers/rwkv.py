"""What RWKV-6 and RWKV-7 have in common: token shift, projections of mixed inputs, the norm of a head's output."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_ext.mixers.base import Mixer, Part, StateShape, batch_first
from megatron_ext.mixers.token_shift import layers_left
from megatron_ext.parallel.exchange import same_on_ranks
from megatron_ext.parallel.parameters import Initializer, constant, new_parameter, normal, zeros


class RWKVMixer(Mixer):
    """Base of mixers whose unit is a head, each of whose features has an input of its own.

    The inputs are mixtures of a token's hidden state and the one before (`token_shift`). They are made on every
    tensor-parallel rank, from the whole of what its context-parallel rank holds, so that the rank projects all of them
    to its own heads. Initial values are those of the authors' code (github.com/BlinkDL/RWKV-LM) where that has a
    formula of layer and channel; the large matrices are normal as everywhere in this model.

    Suffixes: h hidden, u head, d its channels, r rank of a narrow projection, i which of the inputs.
    """

    hands_on_states: ClassVar[bool] = True
    shifts_tokens: ClassVar[bool] = True

    num_features: ClassVar[int]
    """Vectors of head_dim that a head has of a token."""

    def build_input_projection(self, linear: type) -> None:
        """Receptance, key, value, and the norm of a head's output; the back-end's linear has but one input."""
        self.r_proj, self.k_proj, self.v_proj = (self.new_projection() for _ in range(3))
        layer_share = self.layer_number / self.config.num_layers
        self.group_norm_weight = self.new_parameter_of_units(constant(layer_share**0.7), self.head_dim)
        self.group_norm_bias = self.new_parameter_of_units(zeros, self.head_dim)
        self.add_parameters()

    @abstractmethod
    def add_parameters(self) -> None:
        """Add the parameters that a mixer has beside these."""

    @abstractmethod
    def project(self, x_tbh: Tensor, before_1bh: Tensor) -> tuple[Tensor, ...]:
        """A head's features, `num_features` of [t, b, u, d], from hidden states and the row before them.

        Each has a projection of its own; `mix` takes the first as its x and the others from its part's `more`.
        """

    def features(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """See `Mixer.features`."""
        if self.config.sequence_parallel:
            x_tbh = gather_from_sequence_parallel_region(hidden_states, group=self.tp_group)
        else:
            x_tbh = same_on_ranks(hidden_states, self.tp_group)
        return self.project(x_tbh, self.past.rows_before("hidden_states", x_tbh, 1))

    def num_units(self) -> int:
        """Heads."""
        return self.config.num_attention_heads

    def unit_width(self) -> int:
        """All features of a head."""
        return self.num_features * self.head_dim

    def output_width(self) -> int:
        """A head's output."""
        return self.head_dim

    @property
    def depth(self) -> float:
        """Where the layer lies, from 0 for the first to 1 for the last."""
        return (self.layer_number - 1) / max(self.config.num_layers - 1, 1)

    @property
    def layers_left(self) -> float:
        """See `token_shift.layers_left`."""
        return layers_left(self.layer_number, self.config.num_layers)

    def new_projection(self) -> torch.nn.Parameter:
        """From the hidden state to the heads of this rank, [u, d, h]."""
        return self.new_parameter_of_units(normal(self.config.init_method_std), self.head_dim, self.config.hidden_size)

    def new_of_all_ranks(self, start: Initializer, *shape: int, weight_decay: bool = True) -> torch.nn.Parameter:
        """A parameter that every tensor-parallel rank holds whole; to be used through `replicated`."""
        return new_parameter(shape, start, dtype=self.config.params_dtype, weight_decay=weight_decay)

    def narrow(self, x_tbh: Tensor, down_rh: Tensor) -> Tensor:
        """From the hidden state to a few numbers that all heads share, [t, b, r]."""
        return F.linear(x_tbh, self.replicated(down_rh))

    def to_heads(self, x_tbh: Tensor, weight_udh: Tensor) -> Tensor:
        """From the hidden state, or a few numbers made of it, to the heads of this rank, [t, b, u, d]."""
        return F.linear(x_tbh, weight_udh.flatten(0, 1)).unflatten(-1, weight_udh.shape[:2])

    def own_group_norm(self, part: Part) -> tuple[Tensor, Tensor, float]:
        """Weight and bias of `normed_heads`, and its epsilon.

        That is head_dim times that of the model's norms: 64e-5 for heads of 64, as the authors' code has it.
        (flash-linear-attention has the factor in RWKV-7 and not in RWKV-6.)
        """
        weight, bias = (self.own_units(p, part) for p in (self.group_norm_weight, self.group_norm_bias))
        return weight, bias, self.head_dim * self.config.layernorm_epsilon

    def state_shape(self) -> StateShape:
        """See `Mixer.state_shape`."""
        return StateShape(1, self.head_dim, self.head_dim)


def normed_heads(o_btud: Tensor, weight_ud: Tensor, bias_ud: Tensor, epsilon: float) -> Tensor:
    """Each head's output over its own mean and spread, fp32: [b, t, u, d] to [t, b, u, d]."""
    normed = F.layer_norm(batch_first(o_btud).float(), o_btud.shape[-1:], eps=epsilon)
    return normed * weight_ud.float() + bias_ud.float()


def along(channel: Tensor) -> Tensor:
    """Where each of the channels 0, 1, ... lies, from 0 for the first to 1 for the last."""
    return channel / (len(channel) - 1)
