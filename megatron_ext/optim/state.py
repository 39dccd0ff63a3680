"""Common checkpoint format of every optimizer: its moments and fp32 parameters, in the model's shapes.

`optimizer.state.<kind>.<key of the parameter>` is an fp32 tensor of the parameter's whole shape. The kinds are `param`
and the moments of the algorithm, e.g. `exp_avg` and `exp_avg_sq` of AdamW.
A sharded optimizer holds a slice, i.e. consecutive elements, of each flattened parameter. A slice consists of a few
boxes of the parameter. Each rank writes the boxes that it holds, and reads the boxes that it needs, whatever the layout
of the saving run. Nothing is gathered. Loading writes directly to the optimizer's memory. The step count is not saved
here; it follows from the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_ext.optim.algorithm import Algorithm
from megatron_ext.parallel.fp32_values import stored

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a part of a tensor."""


@dataclass(frozen=True)
class FlatSlice:
    """Optimizer state of consecutive elements of a parameter on one rank.

    Attributes:
        parameter: whole parameter of this rank's model shard.
        start: index in the flattened parameter of the first of these elements.
        tensors: 1-D fp32 tensors by kind: `param` (the fp32 copy of the parameter) and the algorithm's moments. Views
            into the optimizer's tensors if possible.
    """

    parameter: Tensor
    start: int
    tensors: dict[str, Tensor]


def placed_state(model_state: dict[str, Any], slices: Iterable[FlatSlice], *, sharded: bool) -> dict[str, Any]:
    """Return the optimizer state as ShardedTensors of the whole model, for dist_checkpointing.

    Args:
        model_state: sharded state dict of the model, whose data are the parameters' `stored` tensors themselves.
        slices: optimizer state of this rank.
        sharded: True if data-parallel ranks hold different slices, False if all hold the same.

    Returns:
        ShardedTensors that share memory with the slices.
    """
    shards: dict[int, list[ShardedTensor]] = {}
    for base in nested_values(model_state):
        if isinstance(base, (ShardedTensor, ShardedTensorFactory)):
            # A parameter may map to separate parts of the whole tensor: SwiGLU's gate and value.
            parts = base.build() if isinstance(base, ShardedTensorFactory) else [base]
            shards[id(base.data)] = list(nested_values(parts))
    placed: dict[str, Any] = {}
    for flat_slice in slices:
        for shard in shards[id(stored(flat_slice.parameter))]:
            for part in _parts_within(flat_slice, shard, sharded):
                placed[f"{len(placed)}"] = part
    return placed


def _parts_within(flat_slice: FlatSlice, shard: ShardedTensor, sharded: bool) -> Iterator[ShardedTensor]:
    """Iterate over the boxes of a slice within `shard`, the checkpoint tensor of all or part of its parameter."""
    assert shard.data is not None
    assert shard.prepend_axis_num == 0, "layers are stored one by one"
    assert shard.data.is_contiguous(), f"{shard.key} is cut along its rows alone"
    begin = shard.data.storage_offset() - stored(flat_slice.parameter).storage_offset()
    length = len(next(iter(flat_slice.tensors.values())))
    first, last = max(flat_slice.start, begin), min(flat_slice.start + length, begin + shard.data.numel())
    for offset, shape in boxes(tuple(shard.data.shape), first - begin, last - begin):
        start = begin - flat_slice.start + _flat_index(offset, tuple(shard.data.shape))
        for kind, tensor in flat_slice.tensors.items():
            data = tensor.narrow(0, start, math.prod(shape)).view(shape)
            yield replace(
                shard,
                key=f"optimizer.state.{kind}.{shard.key}",
                data=data,
                dtype=data.dtype,
                local_shape=shape,
                global_offset=tuple(a + b for a, b in zip(shard.global_offset, offset, strict=True)),
                axis_fragmentations=None,  # boxes of any size
                replica_id=_sole_replica_id(shard.replica_id) if sharded else shard.replica_id,
                allow_shape_mismatch=False,
            )


def _sole_replica_id(replica_id: Any) -> Any:
    """Return a replica id (pipeline, tensor, data-parallel rank) with data-parallel rank 0: one rank holds the data."""
    return (*replica_id[:-1], 0) if isinstance(replica_id, tuple) else 0


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Iterate over the fewest boxes, in order, that cover elements start .. stop - 1 of a row-major tensor."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    first_whole, last_whole = -(-start // inner), stop // inner
    if first_whole > last_whole:  # within one row
        yield from _row_boxes(first_whole - 1, shape, start, stop)
        return
    yield from _row_boxes(first_whole - 1, shape, start, first_whole * inner)
    if first_whole < last_whole:
        yield (first_whole, *(0,) * (len(shape) - 1)), (last_whole - first_whole, *shape[1:])
    yield from _row_boxes(last_whole, shape, last_whole * inner, stop)


def _row_boxes(row: int, shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    before = row * math.prod(shape[1:])
    for offset, size in boxes(shape[1:], start - before, stop - before):
        yield (row, *offset), (1, *size)


def _flat_index(offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
    return sum(o * math.prod(shape[dim + 1 :]) for dim, o in enumerate(offset))


def make_moments(
    optimizer: torch.optim.Optimizer, algorithm: Algorithm, parameters: Iterable[Tensor] | None = None
) -> None:
    """Allocate the state that a torch optimizer creates at its first step, so that a checkpoint can be loaded into it.

    Args:
        optimizer: built by the algorithm.
        algorithm: defines the state.
        parameters: parameters that the optimizer will update; None for the parameters of its groups.
    """
    for parameter in parameters or [p for group in optimizer.param_groups for p in group["params"]]:
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = algorithm.init_state(parameter)


def set_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Set the step count of every parameter, if the optimizer has step counts.

    Each parameter gets its own tensor, because AdamW increments the tensors in place.
    """
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = torch.full_like(state["step"], steps)
    for group in optimizer.param_groups:  # fused optimizers store it here
        if "step" in group:
            is_tensor = isinstance(group["step"], Tensor)
            group["step"] = torch.full_like(group["step"], steps) if is_tensor else steps
