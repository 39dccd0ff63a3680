"""Base class of all sequence mixers: projections, tensor-parallel heads, context-parallel exchange.

The input projection of a mixer yields a vector of features for each *head group* of a token. A head group is the
smallest unit that can be moved to another rank: a query group (its queries, key and value) or a head. The rows of the
projection's weight are ordered by head group. A plain split along dim 0 is therefore a split by head groups, over
tensor-parallel and over context-parallel ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar

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

from megatron_ext.config.traits import MixerTraits
from megatron_ext.mixers.core.decode_cache import HistoryModule
from megatron_ext.mixers.core.documents import mix_by_document
from megatron_ext.mixers.core.history import EMPTY_HISTORY, SequenceHistory
from megatron_ext.mixers.core.shapes import Rounds, StateShape
from megatron_ext.parallel.aligned_linear import AlignedColumnParallelLinear
from megatron_ext.parallel.exchange import copy_to_group, gather_sequence
from megatron_ext.parallel.fp32_values import fp32_values, in_fp32, stored
from megatron_ext.parallel.heads import all_heads, heads_to_sequence, sequence_to_heads
from megatron_ext.parallel.parameters import Initializer, new_parameter
from megatron_ext.parallel.transport import transport_of


@dataclass
class MixerSubmodules:
    """Classes of the back-end's linear layers from which a mixer is built (submodules of Megatron's `ModuleSpec`)."""

    in_proj: type
    out_proj: type


@dataclass(frozen=True)
class MixInput:
    """Slice of the layer's head groups and of the sequence that one call of `Mixer.mix` processes.

    Attributes:
        first_head_group: global index of the first head group.
        num_head_groups: number of head groups.
        first_position: position in the sequence of the first row.
        history: access to the positions before the first row.
        shared: features that all head groups share, [t, b, width]; see `Mixer.shared_features`.
        more: further features of these head groups, [t, b, head groups, width] each; see `Mixer.features`.
    """

    first_head_group: int
    num_head_groups: int
    first_position: int = 0
    history: SequenceHistory = EMPTY_HISTORY
    shared: Tensor | None = None
    more: tuple[Tensor, ...] = ()


class Mixer(HistoryModule, ABC):
    """Base class of every mixer; replaces self-attention in a Megatron `TransformerLayer`.

    A subclass defines the number and widths of its head groups and implements `mix`. This class implements all
    communication between ranks.

    Args:
        config: Megatron's configuration of the model.
        submodules: linear layers to build.
        mixer_config: settings of this mixer (`settings.SETTINGS`).
        layer_number: 1 for the first layer of the whole model.
        pg_collection: process groups; `tp` and `cp` are used.
        cp_comm_type: Megatron's choice of exchange for its own attention; not used.
        name: path of the module, which megatron-core passes since 0.18; not used.
        pp_layer_offset: number of layers in earlier pipeline stages, which hybrid models of megatron-core pass; not
            used.
    """

    traits: ClassVar[MixerTraits] = MixerTraits()
    """Traits of the class. A subclass defines its own."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
        mixer_config: Any,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        name: str | None = None,
        pp_layer_offset: int | None = None,
    ) -> None:
        super().__init__(config, pg_collection.cp)
        self.mixer_config = mixer_config
        self.layer_number = layer_number
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        # Cached, because a call to a process group releases the GIL, for which the autograd thread competes.
        self.tp_size, self.tp_rank = self.tp_group.size(), self.tp_group.rank()
        self.cp_size, self.cp_rank = self.cp_group.size(), self.cp_group.rank()
        self.head_dim: int = config.kv_channels
        self.num_head_groups_per_rank = self.num_head_groups() // self.tp_size
        self.build_input_projection(submodules.in_proj)
        self.out_proj = build_module(
            submodules.out_proj,
            self.num_head_groups() * self.output_width(),
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            tp_comm_buffer_name="proj",
            **self._linear_arguments(),
        )

    def build_input_projection(self, linear: type) -> None:
        """Build the projection of `features`: one column-parallel linear of the back-end. A mixer may override this."""
        self.in_proj = build_module(
            linear,
            self.config.hidden_size,
            self.num_head_groups() * self.head_group_width(),
            init_method=self.config.init_method,
            gather_output=False,
            tp_comm_buffer_name="qkv",
            **self._linear_arguments(),
        )
        if isinstance(self.in_proj, AlignedColumnParallelLinear):
            self.in_proj.head_groups = self.num_head_groups_per_rank

    def _linear_arguments(self) -> dict[str, Any]:
        plain = {"bias": False, "skip_bias_add": False, "is_expert": False}
        return {"config": self.config, "tp_group": self.tp_group, **plain}

    @abstractmethod
    def num_head_groups(self) -> int:
        """Return the number of head groups of the whole layer, over all ranks."""

    @abstractmethod
    def head_group_width(self) -> int:
        """Return the number of features that the input projection yields for a head group."""

    @abstractmethod
    def output_width(self) -> int:
        """Return the number of features that `mix` returns for a head group."""

    @abstractmethod
    def mix(self, x_tbuw: Tensor, part: MixInput) -> Tensor:
        """Mix the sequence.

        Args:
            x_tbuw: projected features, [t, b, head groups, head_group_width + padding]; see `features`.
            part: head groups and positions of `x_tbuw`, and the features that all head groups share.

        Returns:
            [t, b, head groups, output_width].
        """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix hidden states [t, b, hidden]; return the same shape and no bias.

        The sequence is sharded over context-parallel ranks, and over tensor-parallel ranks with sequence parallelism.
        Megatron passes every kind of attention input by keyword. A mixer is causal by itself, so it uses only the
        document boundaries, and only if documents are kept apart: `cu_seqlens_q` as in `mix_by_document`.
        """
        if packed_seq_params is None and self._exchanges_whole_sequences(hidden_states):
            return self._mix_whole_sequences(hidden_states), None
        features, shared = self.features(hidden_states), self.shared_features(hidden_states)
        if packed_seq_params is None:
            o_tbuw = self._mix_over_context(features, shared)
        else:
            assert self.cp_size == 1, "the configuration rules reject this layout"
            o_tbuw = mix_by_document(self._mix_over_context, features, shared, packed_seq_params.cu_seqlens_q)
        return self.out_proj(o_tbuw.flatten(2))

    def features(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Project hidden states to the inputs of `mix`, for this rank's head groups and sequence shard.

        Each tensor of the result is [t, b, head groups, width]. Features beyond the first `head_group_width` are
        padding; `fusion.cut` drops them. This implementation returns one tensor. A mixer with several projections
        returns several tensors, whose widths add up to `head_group_width`. They are not concatenated, because `mix`
        would split them again. `mix` receives all tensors but the first as `MixInput.more`.
        """
        projected, _bias = self.in_proj(hidden_states)
        return (projected.unflatten(-1, (self.num_head_groups_per_rank, -1)),)

    def shared_features(self, hidden_states: Tensor) -> Tensor | None:
        """Return the features that all head groups share, [t, b, width], for this rank's sequence shard, or None."""
        return None

    def project_for_all_head_groups(self, hidden_states: Tensor, weight: Tensor) -> Tensor:
        """Multiply hidden states by a weight [width, hidden] replicated over tensor-parallel ranks: [t, b, width].

        The gradient is summed over the tensor-parallel ranks, which use the result for different head groups.
        """
        if self.config.sequence_parallel:
            part = F.linear(hidden_states, self.replicated(weight))
            return gather_from_sequence_parallel_region(part, group=self.tp_group)
        return copy_to_group(F.linear(hidden_states, weight), self.tp_group)

    def _mix_over_context(self, features_tbuw: tuple[Tensor, ...], shared_tbw: Tensor | None) -> Tensor:
        """Mix this rank's head groups over its sequence shard, or over the whole sequence."""
        # During decoding every rank processes whole sequences.
        cp, head_groups = 1 if self.decode_cache is not None else self.cp_size, self.num_head_groups_per_rank
        x_tbuw, *more = features_tbuw
        supports_sharded_sequence = self.traits.supports_state_passing or self.traits.supports_kv_gather
        assert cp == 1 or supports_sharded_sequence, "the configuration rules reject this layout"
        cache = self.decode_cache
        first_position = self.cp_rank * len(x_tbuw) if cache is None else cache.advance(len(x_tbuw))
        part = MixInput(self.tp_rank * head_groups, head_groups, first_position, self.history, shared_tbw, tuple(more))
        return self.mix(x_tbuw, part)

    def _exchanges_whole_sequences(self, hidden_states: Tensor) -> bool:
        if self.decode_cache is not None:
            return False  # decoding: every rank processes whole sequences
        return self.exchanges_heads(len(hidden_states) * (self.tp_size if self.config.sequence_parallel else 1))

    def _mix_whole_sequences(self, hidden_states: Tensor) -> Tensor:
        """Mix whole sequences of some head groups, between two all-to-alls, in rounds.

        Communication overlaps with computation. While messages of some samples are in flight, other samples are
        projected and mixed. While messages of some head groups are in flight, other head groups are mixed.
        """
        rounds = self.exchange_rounds(hidden_states.shape[1])
        transport = transport_of(self.cp_group, self.config.context_transport)
        incoming = []
        for samples_tbh in hidden_states.chunk(rounds.samples, 1):
            samples_tbh = samples_tbh.contiguous()  # required by the linear layers
            shared = self.shared_features(samples_tbh)
            whole = None if shared is None else gather_sequence(shared, self.cp_group)
            incoming.append((sequence_to_heads(self.features(samples_tbh), transport, rounds.head_groups), whole))
        own_head_groups = self.num_head_groups_per_rank // self.cp_size
        head_groups = own_head_groups // rounds.head_groups
        begin = self.tp_rank * self.num_head_groups_per_rank + self.cp_rank * own_head_groups
        outgoing = []
        for received_rounds, shared in incoming:
            mixed = []
            first_head_groups = range(begin, begin + own_head_groups, head_groups)
            for first, (x_tbuw, *more) in zip(first_head_groups, received_rounds, strict=True):
                o_tbuw = self.mix(x_tbuw, MixInput(first, head_groups, shared=shared, more=tuple(more)))
                mixed.append(heads_to_sequence(o_tbuw, transport))
            outgoing.append(mixed)
        projected = [self.out_proj(all_heads(mixed).flatten(2))[0] for mixed in outgoing]
        return torch.cat(projected, 1) if len(projected) > 1 else projected[0]

    def exchange_rounds(self, num_samples: int) -> Rounds:
        """Return the numbers of rounds into which an exchange is divided, by samples and by head groups.

        The exchange is divided by samples as far as possible, because only then do projections overlap with
        communication. It is divided further by head groups.

        Args:
            num_samples: samples of the micro-batch.
        """
        sample_rounds = gcd(self.config.context_exchange_rounds, num_samples)
        if self.traits.needs_all_head_groups:
            return Rounds(sample_rounds, 1)
        return Rounds(sample_rounds, self.config.context_exchange_rounds // sample_rounds)

    def exchanges_heads(self, num_positions: int) -> bool:
        """Return whether head groups are exchanged by all-to-all; see `ParallelConfig.context_exchange`.

        Args:
            num_positions: number of positions in a context-parallel rank's shard.
        """
        cp, exchange = self.cp_size, self.config.context_exchange
        if cp == 1 or self.num_head_groups_per_rank % cp:
            return False
        sharded = self.sharded_bytes(num_positions)
        if sharded is None or exchange == "heads":
            return True
        alternative = "states" if self.traits.supports_state_passing else "chunks"
        heads = num_positions * (self.head_group_width() + self.output_width()) * self.config.params_dtype.itemsize / cp
        return exchange != alternative and heads <= sharded

    def sharded_bytes(self, num_positions: int) -> float | None:
        """Return the bytes a rank receives in the forward pass from each other rank if the sequence stays sharded.

        Args:
            num_positions: number of positions in a shard.

        Returns:
            Bytes per head group and sample. None if a sharded sequence requires gathering all keys and values, or is
            not supported.
        """
        return self.summary_size() * torch.float32.itemsize if self.traits.supports_state_passing else None

    def state_shape(self) -> StateShape:
        """Return the shape of a head group's states that `states.context_parallel_scan` passes between ranks."""
        raise AssertionError(f"{type(self).__name__} passes no states")

    def summary_size(self) -> int:
        """Return the number of values per head group in a rank's summary; see `states.context_parallel_scan`."""
        states, key_dim, value_dim = self.state_shape()
        return states * key_dim * (key_dim + value_dim)

    def summary_scans(self) -> float:
        """Return the cost of computing a rank's summary, divided by the cost of the scan for the outputs of its shard.

        The summary's scan has values that are `key_dim` wide; see `states.context_parallel_scan`.
        """
        _, key_dim, value_dim = self.state_shape()
        return key_dim / value_dim

    def new_parameter_of_head_groups(
        self, initializer: Initializer, *shape: int, in_fp32: bool = False
    ) -> torch.nn.Parameter:
        """Return a new parameter [head groups of this tensor-parallel rank, *shape]; see `own_head_groups`.

        Weight decay applies to parameters that are a matrix in each head group.

        Args:
            initializer: initializer of the whole parameter.
            shape: shape of the values of one head group.
            in_fp32: True if `own_head_groups` returns the parameter in fp32 even in a 16-bit run, as decays and step
                sizes need.
        """
        whole, matrix = (self.num_head_groups_per_rank, *shape), len(shape) > 1
        options = {"dtype": self.config.params_dtype, "split_over": self.tp_group, "in_fp32": in_fp32}
        return new_parameter(whole, initializer, weight_decay=matrix, **options)

    def replicated(self, parameter: Tensor) -> Tensor:
        """Return a replicated parameter that each rank uses for its own heads; the backward pass sums its gradient."""
        return parameter if self.tp_size == 1 else copy_to_group(parameter, self.tp_group)

    def own_head_groups(self, parameter: Tensor, part: MixInput) -> Tensor:
        """Return a parameter's rows of the head groups in `part`. Dim 0 indexes this rank's head groups.

        Parameters created with `in_fp32` (`new_parameter_of_head_groups`) are returned in fp32.
        """
        start = part.first_head_group - self.tp_rank * self.num_head_groups_per_rank
        return in_fp32(parameter).narrow(0, start, part.num_head_groups)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the sharded state dict, which any parallel layout can load."""
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
        """Load as torch does, and also into the fp32 values of parameters that have them."""
        super()._load_from_state_dict(state_dict, prefix, *more)
        for name, parameter in self._parameters.items():
            values = None if parameter is None else fp32_values(parameter)
            if values is not None and prefix + name in state_dict:
                values.copy_(state_dict[prefix + name])

    def num_parameters(self) -> int:
        """Return the number of parameters of the whole layer's mixer, over all tensor-parallel ranks."""
        split = {True: self.tp_size, False: 1}
        return sum(p.numel() * split[getattr(p, "tensor_model_parallel", False)] for p in self.parameters())

    @abstractmethod
    def mixing_flops(self, seq_length: int) -> float:
        """Return the FLOPs per token and forward pass of operations between activations, over all head groups.

        Operations with weights (projections, convolutions) are not included; `training_flops` counts them by their
        weights. The count follows from the mixer's definition, not from its implementation: only causal pairs of
        positions count, and a multiply-add is two FLOPs.
        """

    def training_flops(self, seq_length: int) -> float:
        """Return the FLOPs per token of forward and backward pass, over all head groups, projections included.

        A weight counts six FLOPs (PaLM, appendix B). Operations between activations count three times their FLOPs in
        the forward pass. Recomputation is not counted.
        """
        return 6 * self.num_parameters() + 3 * self.mixing_flops(seq_length)


def batch_first(x_tbnd: Tensor) -> Tensor:
    """Transpose [t, b, n, d] to the kernels' [b, t, n, d], or back."""
    return x_tbnd.transpose(0, 1)
