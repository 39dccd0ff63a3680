"""Contents of a checkpoint as Megatron's sharded state of model, optimizer and random generators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from megatron_ext.optim.base import RunOptimizer
from megatron_ext.optim.state import FlatSlice, placed_state
from megatron_ext.platform.device import Platform


def unwrap(chunk: Any) -> Any:
    """Return the model inside the wrappers for precision and data parallelism."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def run_state(
    optimizer: RunOptimizer,
    slices: Sequence[FlatSlice],
    groups: ProcessGroupCollection,
    platform: Platform,
    *,
    include_generators: bool = True,
) -> dict[str, Any]:
    """Return the sharded state dictionary to save, or to load into.

    Args:
        optimizer: optimizer with its model chunks. Call this inside `optimizer.gathered_parameters()`.
        slices: slices of the optimizer's state, from `optimizer.slices()`.
        groups: process groups.
        platform: platform of this process.
        include_generators: include the states of the random generators, which depend on the layout.
    """
    model = model_state(optimizer.chunks, groups)
    placed = placed_state(model, slices, sharded=optimizer.shards_state)
    state: dict[str, Any] = {"model": model, "optimizer": {"state": placed, **optimizer.plain_state()}}
    if include_generators:
        state["generators"] = _generators(groups, platform)
    return state


def plain_state(optimizer: RunOptimizer, groups: ProcessGroupCollection, platform: Platform) -> dict[str, Any]:
    """Return the entries of `run_state` that are not tensors: counters, and the states of the random generators."""
    return {"optimizer": optimizer.plain_state(), "generators": _generators(groups, platform)}


def backing_tensors(optimizer: RunOptimizer, slices: Sequence[FlatSlice]) -> list[Tensor]:
    """Return the tensors of which the tensors in `run_state` are views, in a fixed order."""
    return [*optimizer.model_tensors(), *(t for flat_slice in slices for t in flat_slice.tensors.values())]


def model_state(chunks: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> dict[str, Any]:
    """Return the sharded state of the model for `run_state`, by chunk."""
    metadata = {"dp_cp_group": groups.dp_cp, "singleton_local_shards": False}
    model: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        sharded = unwrap(chunk).sharded_state_dict(metadata=metadata)
        # Transformer Engine's extra state is for FP8. Without it a checkpoint works with both back-ends.
        model[f"chunk{number}"] = {key: value for key, value in sharded.items() if not key.endswith("_extra_state")}
    return model


def restore(state: dict[str, Any], optimizer: RunOptimizer, slices: Sequence[FlatSlice], platform: Platform) -> None:
    """Copy a loaded `run_state` into the model, the optimizer and the random generators."""
    restore_model(state["model"], optimizer.chunks)
    optimizer.restore_state(slices, state["optimizer"])
    if "generators" in state:
        _set_generators(state["generators"][0], platform)


def restore_model(model: dict[str, Any], chunks: Sequence[torch.nn.Module]) -> None:
    """Copy the loaded state of a model into its chunks."""
    for number, chunk in enumerate(chunks):
        _load_chunk(unwrap(chunk), model[f"chunk{number}"])


def _load_chunk(model: torch.nn.Module, state: dict[str, Any]) -> None:
    missing, unexpected = model.load_state_dict(state, strict=False)
    mismatched = unexpected + [name for name in missing if not name.endswith("_extra_state")]
    assert not mismatched, f"only in the checkpoint or only in the model: {mismatched}"


def _generators(groups: ProcessGroupCollection, platform: Platform) -> ShardedObject:
    states = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(platform.device) if platform.is_cuda else None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }
    sizes = (groups.pp.size(), groups.tp.size())
    ranks = (groups.pp.rank(), groups.tp.rank())
    return ShardedObject("generators", [states], sizes, ranks, replica_id=groups.dp_cp.rank())


def _set_generators(states: dict[str, Any], platform: Platform) -> None:
    torch.set_rng_state(states["torch"])
    if platform.is_cuda and states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"], platform.device)
    get_cuda_rng_tracker().set_states(states["megatron"])


def generator_layout(groups: ProcessGroupCollection) -> list[int]:
    """Return the parallel sizes on which the states of the random generators depend: [PP, TP]."""
    return [groups.pp.size(), groups.tp.size()]
