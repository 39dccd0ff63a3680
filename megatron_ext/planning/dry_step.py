"""Dry run of a training step of one rank: the real model on meta tensors, to count memory and messages.

The model, the pipeline schedule, the collectives and the tensors saved for backward are those of `selectron train`. But
tensors are on the meta device, process groups are fake and kernels are skipped, so nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.nn import functional

from kernels.common.tensor_cache import clear_tensor_caches
from kernels.meta.fused_call import as_one_kernel
from kernels.meta.unlaunched import unlaunched
from megatron_ext.config.layout import layout_of
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.batches import Batch
from megatron_ext.mixers.core.base import Mixer
from megatron_ext.mixers.core.shapes import Rounds
from megatron_ext.model.build import build_model, check_tiles
from megatron_ext.model.forward_backward import TokenLosses, summed_loss
from megatron_ext.model.meta_device import on_meta
from megatron_ext.model.module_parts import part_members, wrap_method
from megatron_ext.model.output_layer import LanguageModel
from megatron_ext.model.shape import ModelShape, model_shape
from megatron_ext.model.step_parts import BACKWARD, FORWARD, LOSS
from megatron_ext.planning.ledger import Ledger, LedgerMode, Purpose
from megatron_ext.planning.rates import mixer_rate_name
from megatron_ext.planning.te_linears import linears, num_linear_weights, save_like_transformer_engine
from megatron_ext.planning.virtual_gpu import VirtualGpu, groups_of_rank, simulated_config, virtual_gpu


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Cost of a layer, independent of the layout: model FLOPs per token of forward and backward pass.

    Attributes:
        part: name of the mixer's rate; see `rates.mixer_rate_name`.
        mixer_flops: FLOPs of the mixer including its projections.
        projection_flops: portion of `mixer_flops` in linears that can run in FP8.
        feed_forward_flops: FLOPs of the feed-forward.
        exchange_rounds: rounds of the head exchange, see `Mixer.exchange_rounds`; None if the mixer exchanges no heads.
        units: number of (sample, head or group) pairs that a rank mixes at a time.
        summary_scans: number of additional scans if context-parallel ranks pass states, see `Mixer.summary_scans`; else
            0.
    """

    part: str
    mixer_flops: float
    projection_flops: float
    feed_forward_flops: float
    exchange_rounds: Rounds | None
    units: int
    summary_scans: float


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Resources of a rank's step.

    Attributes:
        rank: global rank.
        stage: pipeline stage of the rank, from 0.
        parameters: number of parameters on the rank.
        linear_parameters: portion of `parameters` in linears that can run in FP8.
        micro_batches: number of micro-batches of the dry run: those of a step, but at most as many as are needed to
            reach the memory peak.
        layers: layers of the rank, in order.
        loss_flops: model FLOPs per token of the whole output layer; 0 if the output layer is on another stage.
        has_embedding: True if the input embedding is on this rank.
        replicas: global ranks with the same parameters, over which gradients are reduced.
        ledger: messages, and memory other than parameters, their gradients and optimizer state.
    """

    rank: int
    stage: int
    parameters: int
    linear_parameters: int
    micro_batches: int
    layers: tuple[Layer, ...]
    loss_flops: float
    has_embedding: bool
    replicas: tuple[int, ...]
    ledger: Ledger


def footprint(config: RunConfig, vocab_size: int, world_size: int, rank: int) -> Footprint:
    """Dry-run a step of a rank, in a process that sees no GPU and has no process group.

    Args:
        config: whole configuration, checked for this world size. Linears are Transformer Engine's unless `run.backend`
            is local.
        vocab_size: vocabulary size of the tokenizer, before padding.
        world_size: number of ranks of the run.
        rank: global rank to simulate.
    """
    clear_tensor_caches()  # each run has caches of its own
    gpu = virtual_gpu()
    with groups_of_rank(config.parallel, world_size, rank) as groups:
        shape = model_shape(simulated_config(config), gpu, vocab_size)
        with on_meta():
            chunks = build_model(shape, gpu, groups, seed=None)
        if config.training.fp8 != "none":
            check_tiles((name, linear.weight) for name, linear in linears(chunks))
        micro_batches = _num_micro_batches(config, world_size)
        ledger = _ledger_of_step(config, chunks, groups, gpu, micro_batches)
        return Footprint(
            rank=rank,
            stage=groups.pp.rank(),
            parameters=sum(p.numel() for chunk in chunks for p in chunk.parameters()),
            linear_parameters=num_linear_weights(chunks),
            micro_batches=micro_batches,
            layers=tuple(_layers(shape, chunks, config)),
            loss_flops=_loss_flops(shape, chunks),
            has_embedding=any(model.pre_process for model in _models(chunks)),
            replicas=tuple(dist.get_process_group_ranks(groups.dp_cp)),
            ledger=ledger,
        )


def _models(chunks: Sequence[nn.Module]) -> list[LanguageModel]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, LanguageModel)]


def _layers(shape: ModelShape, chunks: Sequence[nn.Module], config: RunConfig) -> Iterator[Layer]:
    seq_length, samples = config.data.seq_length, config.training.micro_batch_size
    for mixer in (module for chunk in chunks for module in chunk.modules() if isinstance(module, Mixer)):
        score = getattr(mixer.mixer_config, "score", None)
        rounds = mixer.exchange_rounds(samples) if mixer.exchanges_heads(seq_length // mixer.cp_size) else None
        num_parts = mixer.cp_size * rounds.samples * rounds.head_groups if rounds else 1
        yield Layer(
            part=mixer_rate_name(shape.mixers[mixer.layer_number - 1], score),
            mixer_flops=mixer.training_flops(seq_length),
            projection_flops=6 * mixer.tp_size * num_linear_weights([mixer]),
            feed_forward_flops=6 * shape.feed_forward_parameters,
            exchange_rounds=rounds,
            units=samples * mixer.num_head_groups_per_rank // num_parts,
            summary_scans=0.0 if rounds else _summary_scans(mixer),
        )


def _summary_scans(mixer: Mixer) -> float:
    return mixer.summary_scans() if mixer.cp_size > 1 and mixer.traits.supports_state_passing else 0.0


def _loss_flops(shape: ModelShape, chunks: Sequence[nn.Module]) -> float:
    has_loss = any(model.post_process for model in _models(chunks))
    return 6.0 * shape.model.hidden_size * shape.padded_vocab_size if has_loss else 0.0


def _num_micro_batches(config: RunConfig, world_size: int) -> int:
    """Return the number of micro-batches of the dry run. After two fillings of the pipeline, memory no longer grows."""
    max_needed = 2 * config.parallel.pipeline * config.parallel.virtual_pipeline
    return min(layout_of(config, world_size).num_micro_batches, max_needed)


def _ledger_of_step(
    config: RunConfig, chunks: Sequence[nn.Module], groups: ProcessGroupCollection, gpu: VirtualGpu, micro_batches: int
) -> Ledger:
    ledger, current_part = Ledger(), _CurrentPart()
    mode = LedgerMode(ledger, current_part)
    mode.exclude([*(p for chunk in chunks for p in chunk.parameters()), *(b for c in chunks for b in c.buffers())])
    data, size = config.data, config.training.micro_batch_size
    losses = TokenLosses(chunks, groups, gpu, data.seq_length, size, reset_attention=data.reset_attention)
    with ExitStack() as stack:
        for member in part_members(chunks):
            stack.enter_context(
                wrap_method(member.module, "forward", partial(current_part.enter, member.part, member.layer))
            )
        for parameter in (p for chunk in chunks for p in chunk.parameters() if p.requires_grad):
            handle = parameter.register_post_accumulate_grad_hook(_drop_gradient)
            stack.callback(handle.remove)
        stack.enter_context(count_fused_kernels())
        stack.enter_context(unlaunched())
        if config.run.backend != "local":
            stack.enter_context(save_like_transformer_engine(chunks, config.training.fp8))
        batches = [_batch(config, groups.cp.size(), gpu.device) for _ in range(micro_batches)]
        stack.enter_context(mode)
        losses.run(batches, summed_loss, forward_only=False)
    return ledger


class _CurrentPart:
    """Tracker of the model part that is being computed. It is updated on entry and exit of the part's modules."""

    def __init__(self) -> None:
        self._stack: list[tuple[str, int | None]] = [(LOSS, None)]

    def __call__(self) -> Purpose:
        is_backward = torch._C._current_graph_task_id() != -1
        return Purpose(*self._stack[-1], BACKWARD if is_backward else FORWARD)

    @contextmanager
    def enter(self, part: str, layer: int | None) -> Iterator[None]:
        """Context manager within which the given part is current."""
        self._stack.append((part, layer))
        try:
            yield
        finally:
            self._stack.pop()


def _drop_gradient(parameter: Tensor) -> None:
    """Free a parameter's gradient at once, as if it had been added to the main gradients."""
    parameter.grad = None


@contextmanager
def count_fused_kernels() -> Iterator[None]:
    """Context manager in which norms and Megatron's SwiGLU count as one kernel each, as on a GPU.

    On meta tensors torch runs several operations for each.
    """
    kernels = [(functional, name) for name in ("rms_norm", "layer_norm")]
    kernels += [(fused_bias_swiglu, name) for name in ("swiglu", "swiglu_back")]
    with ExitStack() as stack:
        for module, name in kernels:
            stack.enter_context(patch.object(module, name, partial(as_one_kernel, getattr(module, name))))
        yield


def _batch(config: RunConfig, cp_size: int, device: torch.device) -> Batch:
    """Return a micro-batch of this rank, with one document per sample."""
    batch_size, length = config.training.micro_batch_size, config.data.seq_length // cp_size
    tokens = torch.empty(batch_size, length, dtype=torch.int64, device=device)
    # The boundaries are on the CPU because their values are read.
    cu_seqlens = torch.arange(batch_size + 1, dtype=torch.int32) * length if config.data.reset_attention else None
    return Batch(
        tokens=tokens,
        labels=torch.empty_like(tokens),
        loss_mask=torch.empty(batch_size, length, device=device),
        position_ids=torch.empty_like(tokens),
        cu_seqlens=cu_seqlens,
    )
