"""What every sequence mixer has in common: projections, tensor-parallel heads, the context-parallel exchange.

A mixer's input projection yields, for each *unit*, one row of features. A unit is what can be given to another rank
without breaking the mixer: a query group (its queries, key and value) or a head. Rows are interleaved per unit, so that
a plain split along dim 0 is a split by units, over tensor-parallel ranks as over context-parallel ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from megatron_ext.mixers.documents import mix_by_document
from megatron_ext.mixers.memory import LooksBack
from megatron_ext.mixers.past import BEGINNING, Past
from megatron_ext.parallel.aligned_linear import AlignedColumnParallelLinear
from megatron_ext.parallel.exchange import gather_sequence, same_on_ranks
from megatron_ext.parallel.fp32_values import fp32_values, in_fp32, stored
from megatron_ext.parallel.heads import all_heads, heads_to_sequence, sequence_to_heads
from megatron_ext.parallel.parameters import Initializer, new_parameter
from megatron_ext.parallel.transport import transport_of


@dataclass
class MixerSubmodules:
    """The back-end's linears that a mixer is built from (Megatron's `ModuleSpec` submodules)."""

    in_proj: type
    out_proj: type


@dataclass(frozen=True)
class Part:
    """Which part of the whole problem a call of `Mixer.mix` is given.

    Attributes:
        first_unit: global index of the first unit.
        num_units: units given.
        first_position: position in the sequence of the first row given.
        past: what lies before that row.
        shared: features that every unit is given beside its own, [t, b, width]; see `Mixer.shared_features`.
        more: further features of these units, [t, b, units, width] each; see `Mixer.features`.
    """

    first_unit: int
    num_units: int
    first_position: int = 0
    past: Past = BEGINNING
    shared: Tensor | None = None
    more: tuple[Tensor, ...] = ()


class StateShape(NamedTuple):
    """States of a unit.

    Attributes:
        states: how many.
        key_dim: rows of each.
        value_dim: columns of each, as wide as the values that are written to it.
    """

    states: int
    key_dim: int
    value_dim: int


class Rounds(NamedTuple):
    """In how many parts a rank exchanges what it has for whole sequences; see `Mixer.exchange_rounds`.

    Attributes:
        samples: in which it does its samples.
        units: in which it does the units of those.
    """

    samples: int
    units: int


class Mixer(LooksBack, ABC):
    """Base of every mixer; takes the place of self-attention in a Megatron `TransformerLayer`.

    A subclass says how many units it has and how wide each is, and writes `mix`. Everything between processes is here.

    Args:
        config: Megatron's configuration of the model.
        submodules: linears to build.
        mixer_config: the mixer's own small configuration.
        layer_number: 1 for the first layer of the whole model.
        pg_collection: process groups; `tp` and `cp` are used.
        cp_comm_type: Megatron's own choice of exchange for its own attention; not used.
    """

    gathers_keys_and_values: ClassVar[bool] = False
    """Whether context parallelism may gather the sequence of keys and values where units do not divide."""

    hands_on_states: ClassVar[bool] = False
    """Whether context parallelism may leave the sequence in parts and hand a state on from one to the next."""

    chunk_field: ClassVar[str | None] = None
    """The field of its configuration with the size of the chunks that context parallelism fetches when chosen."""

    units_are_groups: ClassVar[bool] = False
    """Whether a unit is a query group, not a head."""

    needs_all_units: ClassVar[bool] = False
    """Whether what a unit is given depends on the others of its layer, so that they must be mixed in one call."""

    keeps_documents_apart: ClassVar[bool] = False
    """Whether the mixer looks back in `mix` alone, so that a call of it for each document keeps others away."""

    shifts_tokens: ClassVar[bool] = False
    """Whether the mixer mixes each token's hidden state with the one before by itself; see `rwkv7_block`."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
        mixer_config: Any,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
    ) -> None:
        super().__init__(config, pg_collection.cp)
        self.mixer_config = mixer_config
        self.layer_number = layer_number
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        # Kept, as a group that is asked lets go of Python's lock, which the gradient's thread may have then.
        self.tp_size, self.tp_rank = self.tp_group.size(), self.tp_group.rank()
        self.cp_size, self.cp_rank = self.cp_group.size(), self.cp_group.rank()
        self.head_dim: int = config.kv_channels
        self.num_units_per_rank = self.num_units() // self.tp_size
        self.build_input_projection(submodules.in_proj)
        self.out_proj = build_module(
            submodules.out_proj,
            self.num_units() * self.output_width(),
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            tp_comm_buffer_name="proj",
            **self._of_both_linears(),
        )

    def build_input_projection(self, linear: type) -> None:
        """Build what `features` projects with: the back-end's column-parallel linear, which a mixer may do without."""
        self.in_proj = build_module(
            linear,
            self.config.hidden_size,
            self.num_units() * self.unit_width(),
            init_method=self.config.init_method,
            gather_output=False,
            tp_comm_buffer_name="qkv",
            **self._of_both_linears(),
        )
        if isinstance(self.in_proj, AlignedColumnParallelLinear):
            self.in_proj.units = self.num_units_per_rank

    def _of_both_linears(self) -> dict[str, Any]:
        plain = {"bias": False, "skip_bias_add": False, "is_expert": False}
        return {"config": self.config, "tp_group": self.tp_group, **plain}

    @abstractmethod
    def num_units(self) -> int:
        """Units of the whole layer, over all ranks."""

    @abstractmethod
    def unit_width(self) -> int:
        """Features that the input projection yields for a unit."""

    @abstractmethod
    def output_width(self) -> int:
        """Features that `mix` returns for a unit."""

    @abstractmethod
    def mix(self, x_tbuw: Tensor, part: Part) -> Tensor:
        """Mix the sequence.

        Args:
            x_tbuw: projected features, [t, b, units, unit_width], and maybe padding behind them; see `features`.
            part: which units and positions these are, and what all units are given.

        Returns:
            [t, b, units, output_width].
        """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[t, b, hidden] (split by context, and by tensor with sequence parallelism) to the same shape, and no bias.

        Megatron passes every kind of attention input by keyword. A mixer is causal by itself and needs of them only
        where documents begin, `cu_seqlens_q` as `mix_by_document` takes it, if they are to be kept apart.
        """
        if packed_seq_params is None and self._has_whole_sequences_sent(hidden_states):
            return self._mix_whole_sequences(hidden_states), None
        features, shared = self.features(hidden_states), self.shared_features(hidden_states)
        if packed_seq_params is None:
            o_tbuw = self._mix_over_context(features, shared)
        else:
            assert self.cp_size == 1, "the rules refuse this layout"
            o_tbuw = mix_by_document(self._mix_over_context, features, shared, packed_seq_params.cu_seqlens_q)
        return self.out_proj(o_tbuw.flatten(2))

    def features(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """What `mix` is given, of this rank's units and its part of the context: [t, b, units, width] each.

        What is behind the first `unit_width` features is padding; `fusion.cut` leaves it out.
        One tensor here. A mixer with more projections has more, whose widths add up to `unit_width`: put together, they
        would be copied, only to be cut apart again. `mix` finds those behind the first in its `Part.more`.
        """
        projected, _bias = self.in_proj(hidden_states)
        return (projected.unflatten(-1, (self.num_units_per_rank, -1)),)

    def shared_features(self, hidden_states: Tensor) -> Tensor | None:
        """Features that every unit is given beside its own, [t, b, width], of this rank's part of the context."""
        return None

    def project_for_all_units(self, hidden_states: Tensor, weight: Tensor) -> Tensor:
        """Hidden states times a weight [width, hidden] that all tensor-parallel ranks hold whole: [t, b, width].

        What the ranks' units send back is summed.
        """
        if self.config.sequence_parallel:
            part = F.linear(hidden_states, self.replicated(weight))
            return gather_from_sequence_parallel_region(part, group=self.tp_group)
        return same_on_ranks(F.linear(hidden_states, weight), self.tp_group)

    def _mix_over_context(self, features_tbuw: tuple[Tensor, ...], shared_tbw: Tensor | None) -> Tensor:
        """Mix this rank's units where it has a part of the sequence, or all of it."""
        # While it decodes, each rank is given whole sequences.
        cp, units = 1 if self.memory is not None else self.cp_size, self.num_units_per_rank
        x_tbuw, *more = features_tbuw
        assert cp == 1 or self.hands_on_states or self.gathers_keys_and_values, "the rules refuse this layout"
        first_position = self.cp_rank * len(x_tbuw) if self.memory is None else self.memory.advance(len(x_tbuw))
        part = Part(self.tp_rank * units, units, first_position, self.past, shared_tbw, tuple(more))
        return self.mix(x_tbuw, part)

    def _has_whole_sequences_sent(self, hidden_states: Tensor) -> bool:
        if self.memory is not None:
            return False  # each rank is given whole sequences
        return self.exchanges_heads(len(hidden_states) * (self.tp_size if self.config.sequence_parallel else 1))

    def _mix_whole_sequences(self, hidden_states: Tensor) -> Tensor:
        """Exchange, mix whole sequences of the units that are this rank's meanwhile, and exchange back, in rounds.

        Messages of some samples travel while others are projected or mixed, those of some units while others are mixed.
        """
        rounds = self.exchange_rounds(hidden_states.shape[1])
        transport = transport_of(self.cp_group, self.config.context_transport)
        coming = []
        for some_tbh in hidden_states.chunk(rounds.samples, 1):
            some_tbh = some_tbh.contiguous()  # as linears need it
            shared = self.shared_features(some_tbh)
            whole = None if shared is None else gather_sequence(shared, self.cp_group)
            coming.append((sequence_to_heads(self.features(some_tbh), transport, rounds.units), whole))
        own = self.num_units_per_rank // self.cp_size
        units, of_rank = own // rounds.units, self.tp_rank * self.num_units_per_rank + self.cp_rank * own
        going = []
        for arriving, shared in coming:
            mixed = []
            for first, (x_tbuw, *more) in zip(range(of_rank, of_rank + own, units), arriving, strict=True):
                o_tbuw = self.mix(x_tbuw, Part(first, units, shared=shared, more=tuple(more)))
                mixed.append(heads_to_sequence(o_tbuw, transport))
            going.append(mixed)
        projected = [self.out_proj(all_heads(mixed).flatten(2))[0] for mixed in going]
        return torch.cat(projected, 1) if len(projected) > 1 else projected[0]

    def exchange_rounds(self, num_samples: int) -> Rounds:
        """Calls of `mix` for what this rank exchanges: of some samples as far as they divide, of some units beyond.

        Rounds of samples come first, as projections hide messages, too, then.

        Args:
            num_samples: of the micro-batch.
        """
        of_samples = gcd(self.config.context_exchange_rounds, num_samples)
        of_units = 1 if self.needs_all_units else self.config.context_exchange_rounds // of_samples
        return Rounds(of_samples, of_units)

    def exchanges_heads(self, num_positions: int) -> bool:
        """Whether whole units change places with parts of the sequence; see `ParallelConfig.context_exchange`.

        Args:
            num_positions: of a part.
        """
        cp, chosen = self.cp_size, self.config.context_exchange
        if cp == 1 or self.num_units_per_rank % cp:
            return False
        in_parts = self.bytes_in_parts(num_positions)
        if in_parts is None or chosen == "heads":
            return True
        own = "states" if self.hands_on_states else "chunks"
        heads = num_positions * (self.unit_width() + self.output_width()) * self.config.params_dtype.itemsize / cp
        return chosen != own and heads <= in_parts

    def bytes_in_parts(self, num_positions: int) -> float | None:
        """Bytes of a unit and sample that a rank receives forward from each other where the sequence stays in parts.

        Args:
            num_positions: of a part.

        Returns:
            None where that can only be done by gathering all keys and values, if at all.
        """
        return self.summary_size() * torch.float32.itemsize if self.hands_on_states else None

    def state_shape(self) -> StateShape:
        """What a unit's states are that `states.walk_by_parts` hands on."""
        raise AssertionError(f"{type(self).__name__} hands no states on")

    def summary_size(self) -> int:
        """Numbers of a unit that a rank tells the others when states are handed on; see `states.walk_by_parts`."""
        states, key_dim, value_dim = self.state_shape()
        return states * key_dim * (key_dim + value_dim)

    def summary_walks(self) -> float:
        """Walks over its part that a rank's summary takes beside the one for its outputs, in times of that one.

        Values are wider in that one by as much as keys are; see `states.walk_by_parts`.
        """
        _, key_dim, value_dim = self.state_shape()
        return key_dim / value_dim

    def new_parameter_of_units(
        self, initializer: Initializer, *shape: int, in_fp32: bool = False
    ) -> torch.nn.Parameter:
        """A parameter [units of this tensor-parallel rank, *shape]; see `own_units`.

        Weight decay is for what is a matrix in each unit.

        Args:
            initializer: of the whole parameter.
            shape: of a unit.
            in_fp32: whether `own_units` gives it in fp32 also in a run of 16 bits: what decays and steps are made of.
        """
        whole, matrix = (self.num_units_per_rank, *shape), len(shape) > 1
        options = {"dtype": self.config.params_dtype, "split_over": self.tp_group, "in_fp32": in_fp32}
        return new_parameter(whole, initializer, weight_decay=matrix, **options)

    def replicated(self, parameter: Tensor) -> Tensor:
        """A parameter that all tensor-parallel ranks hold whole but use for their own heads: its gradient is summed."""
        return parameter if self.tp_size == 1 else same_on_ranks(parameter, self.tp_group)

    def own_units(self, parameter: Tensor, part: Part) -> Tensor:
        """The rows of a parameter that belong to the units of `part`; dim 0 is this tensor-parallel rank's units.

        In fp32 where the parameter is one that the forward pass takes so (`new_parameter_of_units`).
        """
        start = part.first_unit - self.tp_rank * self.num_units_per_rank
        return in_fp32(parameter).narrow(0, start, part.num_units)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Where each parameter lies in the whole model, for checkpoints that load at any layout."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Tensor] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        axes = {n: p.partition_dim for n, p in own.items() if getattr(p, "tensor_model_parallel", False)}  # type: ignore[attr-defined]
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        own = {name: stored(parameter) for name, parameter in own.items()}
        result = make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets, **groups)
        for name, child in self.named_children():
            result.update(
                sharded_state_dict_default(child, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group)
            )
        return result

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        """As torch's, and into the fp32 values that parameters have beside them."""
        super()._load_from_state_dict(state_dict, prefix, *more)
        for name, parameter in self._parameters.items():
            values = None if parameter is None else fp32_values(parameter)
            if values is not None and prefix + name in state_dict:
                values.copy_(state_dict[prefix + name])

    def num_parameters(self) -> int:
        """Parameters of the whole layer's mixer, over all tensor-parallel ranks."""
        split = {True: self.tp_size, False: 1}
        return sum(p.numel() * split[getattr(p, "tensor_model_parallel", False)] for p in self.parameters())

    @abstractmethod
    def mixing_flops(self, seq_length: int) -> float:
        """Floating-point operations a token and forward pass between activations, over all units.

        Those with weights (projections, convolutions) are counted by the weights. Operations that the definition needs
        (causal pairs counted once, a multiply-add as two), whatever an implementation spends.
        """

    def training_flops(self, seq_length: int) -> float:
        """Floating-point operations a token of forward and backward pass, projections included, over all units.

        Six a weight (PaLM, appendix B), three times the forward's for what is beside them; nothing for recomputation.
        """
        return 6 * self.num_parameters() + 3 * self.mixing_flops(seq_length)


def batch_first(x_tbnd: Tensor) -> Tensor:
    """[t, b, n, d] to the kernels' [b, t, n, d], or back."""
    return x_tbnd.transpose(0, 1)
