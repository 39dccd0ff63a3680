"""Functions run by each rank in a parity case: train a few steps and return the numbers with the whole parameters.

The parameters are assembled here independently of the code under test. The table `SPLIT` lists which dimension of which
weight is split, and layers are named by Megatron's layer numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.config.derive import derive
from megatron_ext.config.layout import layout_of
from megatron_ext.config.rules import check
from megatron_ext.config.schema import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from megatron_ext.data.batches import Batch, micro_batch_indices, training_batch
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.mixers.core import base, chunk_fetch, history, key_value
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.model.build import build_model, training_flops_per_token
from megatron_ext.model.shape import ModelShape, model_shape
from megatron_ext.parallel.groups import make_process_groups
from megatron_ext.parallel.parameters import ParameterCount
from megatron_ext.platform.device import select_platform
from megatron_ext.training import model_size as sizes
from megatron_ext.training.build import build_trainer
from megatron_ext.training.trainer import Trainer

VOCABULARY, LENGTH, SEED = 117, 32, 1234  # padded to 128 rows, on the last tensor-parallel rank
# The second step starts from updated parameters, and its moments combine two gradients. More steps would repeat this.
STEPS = 2
CLIP = 0.5  # below the first gradient norm of every model, so that steps are clipped

# Dimension that tensor parallelism splits, by suffix of the weight's name. All other weights are replicated.
SPLIT = {
    "in_proj.weight": 0,
    "out_proj.weight": 1,
    "linear_fc1.weight": 0,
    "linear_fc2.weight": 1,
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "conv_weight": 0,
    "log_decay": 0,
    "step_bias": 0,
    "decay_up": 0,
    "decay_bias": 0,
    "conv_bias": 0,
    "skip": 0,
    "group_norm_weight": 0,
    "x_proj": 0,
    "dt_proj": 0,
    "dt_bias": 0,
    ".A_log": 0,
    ".D": 0,
    ".r_proj": 0,
    ".k_proj": 0,
    ".v_proj": 0,
    ".g_proj": 0,
    "rate_up": 0,
    "gate_up": 0,
    "decay_base": 0,
    "rate_base": 0,
    "removal_scale": 0,
    "key_rate": 0,
    "bonus": 0,
    "group_norm_bias": 0,
}


@dataclass(frozen=True)
class Outcome:
    """Results of a run.

    Attributes:
        losses: loss of each step.
        norms: gradient norm of each step.
        tokens: number of predicted tokens of each step.
        parameters: whole parameters after the last step, by name in the whole model.
        exchanges: number of calls of each context-parallel exchange on rank 0.
    """

    losses: list[float]
    norms: list[float]
    tokens: list[int]
    parameters: dict[str, Tensor]
    exchanges: Mapping[str, int]


def run_config(
    pattern: str,
    mixers: dict[str, dict[str, Any]],
    model: dict[str, Any],
    parallel: dict[str, Any],
    *,
    precision: str = "fp32",
    recompute: str = "none",
    sharding: str = "megatron",
    micro_batch_size: int = 2,
    global_batch_size: int = 8,
    **optimizer: Any,
) -> RunConfig:
    """Configuration of the small model and batch of all parity cases."""
    return derive(
        RunConfig(
            data=DataConfig(path="in memory", seq_length=LENGTH),
            model=ModelConfig(pattern=pattern, hidden_size=64, **{"num_attention_heads": 4, **model}),
            mixers=mixers,
            parallel=ParallelConfig(**parallel),
            training=TrainingConfig(
                steps=STEPS,
                global_batch_size=global_batch_size,
                micro_batch_size=micro_batch_size,
                precision=cast(Any, precision),
                seed=SEED,
                recompute=cast(Any, recompute),
            ),
            optimizer=OptimizerConfig(
                lr=1e-3,
                min_lr=1e-3,
                schedule="constant",
                weight_decay=0.1,
                clip_grad=CLIP,
                # Adam normalizes a gradient by its magnitude. With 1e-8, the few elements (of 200,000) whose gradient
                # is only rounding noise would move by about 1e-5 in either direction if the order of a sum changes.
                epsilon=1e-6,
                sharding=cast(Any, sharding),
                **optimizer,
            ),
        )
    )


def train(rank: int, world_size: int, config: RunConfig) -> Outcome | None:
    """Train. Return the outcome on rank 0 and None on other ranks."""
    platform = select_platform("cpu")
    check(config, world_size, load_all())
    groups = make_process_groups(config.parallel, config.training.seed)
    trainer = build_trainer(config, model_shape(config, platform, VOCABULARY), groups, platform)
    with counted_exchanges() as exchanges:
        results = [trainer.train_step(step_batches(config, groups, step)) for step in range(STEPS)]
    with trainer.optimizer.gathered_parameters():
        parameters = whole_parameters(trainer.optimizer.chunks, groups.tp.rank())
    if rank != 0:
        return None
    return Outcome(
        losses=[result.loss for result in results],
        norms=[result.grad_norm for result in results],
        tokens=[result.predicted for result in results],
        parameters=parameters,
        exchanges=exchanges,
    )


def flops_per_token(rank: int, world_size: int, config: RunConfig) -> float:
    """Model FLOPs per token that a run would report."""
    shape, trainer = _built(config)
    with trainer.optimizer.gathered_parameters():
        return training_flops_per_token(shape, trainer.optimizer.chunks, LENGTH)


def model_size(rank: int, world_size: int, config: RunConfig) -> ParameterCount:
    """Number of parameters that a run would record."""
    _, trainer = _built(config)
    with trainer.optimizer.gathered_parameters():
        return sizes.model_size(trainer)


def _built(config: RunConfig) -> tuple[ModelShape, Trainer]:
    platform = select_platform("cpu")
    groups = make_process_groups(config.parallel, config.training.seed)
    shape = model_shape(config, platform, VOCABULARY)
    return shape, build_trainer(config, shape, groups, platform)


def plain_first_step(rank: int, world_size: int, config: RunConfig) -> tuple[float, float]:
    """Loss and gradient norm of the first step, without schedule, optimizer and loss reduction of the code under test.

    Run the whole batch through the bare model, with cross entropy over the unmasked tokens and torch's autograd.
    """
    platform = select_platform("cpu")
    groups = make_process_groups(config.parallel, config.training.seed)
    shape = model_shape(config, platform, VOCABULARY)
    (model,) = build_model(shape, platform, groups, config.training.seed)
    batch = masked_batch(list(range(config.training.global_batch_size)), groups)
    logits = model(batch.tokens, batch.position_ids, attention_mask=None)[..., :VOCABULARY]
    counted = batch.loss_mask.bool()
    loss = torch.nn.functional.cross_entropy(logits[counted], batch.labels[counted])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return float(loss), float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())


def packed_first_step(rank: int, world_size: int, config: RunConfig, bounds: list[int]) -> tuple[float, float]:
    """Loss and gradient norm of a step on one micro-batch whose documents, bounded by `bounds`, are isolated."""
    platform = select_platform("cpu")
    check(config, world_size, load_all())
    groups = make_process_groups(config.parallel, config.training.seed)
    trainer = build_trainer(config, model_shape(config, platform, VOCABULARY), groups, platform)
    batch = masked_batch(list(range(config.training.micro_batch_size)), groups)
    result = trainer.train_step([replace(batch, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))])
    return result.loss, result.grad_norm


def first_step_by_document(rank: int, world_size: int, config: RunConfig, bounds: list[int]) -> tuple[float, float]:
    """Expected result of `packed_first_step`: each document passes alone through a bare model without `cu_seqlens`."""
    platform = select_platform("cpu")
    groups = make_process_groups(config.parallel, config.training.seed)
    (model,) = build_model(model_shape(config, platform, VOCABULARY), platform, groups, config.training.seed)
    batch = masked_batch(list(range(config.training.micro_batch_size)), groups)
    tokens, labels, counted = batch.tokens.flatten(), batch.labels.flatten(), batch.loss_mask.flatten()
    total = torch.zeros(())
    for begin, end in pairwise(bounds):
        logits = model(tokens[None, begin:end], torch.arange(end - begin)[None], attention_mask=None)[..., :VOCABULARY]
        losses = torch.nn.functional.cross_entropy(logits[0], labels[begin:end], reduction="none")
        total = total + (losses * counted[begin:end]).sum()
    loss = total / counted.sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return float(loss), float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())


class RandomSamples:
    """Fake of the training samples: sample i consists of random tokens that depend only on i."""

    seq_length = LENGTH

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng([SEED, index]).integers(0, VOCABULARY, LENGTH + 1)


def loss_mask(index: int) -> np.ndarray:
    """Loss mask of a sample. Every third has no holes, others a random share, so that token counts differ by rank."""
    random = np.random.default_rng([SEED + 1, index])
    share = 0.0 if index % 3 == 0 else random.uniform(0.1, 0.9)
    return (random.random(LENGTH) >= share).astype(np.float32)


def step_batches(config: RunConfig, groups: Any, step: int) -> list[Batch]:
    """Micro-batches of this rank in a step."""
    size, first = config.training.micro_batch_size, step * config.training.global_batch_size
    count = layout_of(config, dist.get_world_size()).num_micro_batches
    return [
        masked_batch(list(micro_batch_indices(first, m, size, groups.dp.rank(), groups.dp.size())), groups)
        for m in range(count)
    ]


def masked_batch(indices: list[int], groups: Any) -> Batch:
    """Batch as the loader builds it, with holes in its loss mask."""
    cp_rank, cp_size = groups.cp.rank(), groups.cp.size()
    batch = training_batch(cast(TrainingSamples, RandomSamples()), indices, cp_rank, cp_size)
    masks = torch.from_numpy(np.stack([loss_mask(index) for index in indices]))
    return replace(batch, loss_mask=masks.chunk(cp_size, dim=1)[cp_rank].contiguous())


def whole_parameters(chunks: Any, tp_rank: int, values: dict[int, Tensor] | None = None) -> dict[str, Tensor]:
    """Assemble the parameters of the whole model from all ranks, on rank 0. Return an empty dict on other ranks.

    Args:
        chunks: model chunks of this rank.
        tp_rank: tensor-parallel rank of this rank.
        values: tensors to assemble instead of the parameters, by `id` of the parameter.

    Raises:
        AssertionError: replicas of a parameter are not bit-identical.
    """
    gated = chunks[0].config.gated_linear_unit
    named = [(name, p if values is None else values[id(p)]) for chunk in chunks for name, p in _named_globally(chunk)]
    own = {name: tensor.detach().float().clone() for name, tensor in named}
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((tp_rank, own), gathered)
    if gathered is None:
        return {}
    parts: dict[str, dict[int, Tensor]] = {}
    for rank, tensors in gathered:
        for name, tensor in tensors.items():
            key = rank if _split_dimension(name) is not None else 0
            known = parts.setdefault(name, {}).setdefault(key, tensor)
            assert torch.equal(known, tensor), f"replicas of {name} differ by {(known - tensor).abs().max():.3g}"
    return {name: _join(name, [held[rank] for rank in sorted(held)], gated) for name, held in sorted(parts.items())}


def _named_globally(chunk: Any) -> Iterator[tuple[str, Tensor]]:
    model = chunk
    while hasattr(model, "module"):
        model = model.module
    numbers = {f"decoder.layers.{i}.": layer.layer_number for i, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():
        for local, number in numbers.items():
            if name.startswith(local):
                name = f"layer {number} " + name[len(local) :]
                break
        # The last stage's copy of a tied embedding must stay equal to that of the first stage.
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        yield name, parameter


def _split_dimension(name: str) -> int | None:
    return next((dim for end, dim in SPLIT.items() if name.endswith(end)), None)


def _join(name: str, parts: list[Tensor], gated: bool) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if gated and name.endswith("linear_fc1.weight"):  # each rank stacks its rows of the gate and of the value
        return torch.cat([torch.cat([part.chunk(2)[half] for part in parts]) for half in range(2)])
    dim = _split_dimension(name)
    assert dim is not None
    return torch.cat(parts, dim)


@contextmanager
def counted_exchanges() -> Iterator[Counter[str]]:
    """Context manager that counts the calls of each context-parallel exchange in the mixers."""
    calls: Counter[str] = Counter()
    names = {
        base: ["sequence_to_heads", "heads_to_sequence"],
        chunk_fetch: ["fetch_blocks"],
        key_value: ["gather_sequence", "to_zigzag"],
        history: ["gather_sequence", "context_parallel_scan", "diagonal_state_before"],
    }
    places = [(module, name) for module, of_module in names.items() for name in of_module]
    originals = [getattr(module, name) for module, name in places]

    def counting(name: str, original: Any) -> Any:
        def call(*args: Any) -> Tensor:
            calls[name] += 1
            return original(*args)

        return call

    for (module, name), original in zip(places, originals, strict=True):
        setattr(module, name, counting(name, original))
    try:
        yield calls
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)
