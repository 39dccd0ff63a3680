"""The one form in which every optimizer's state is saved: Adam's moments and fp32 parameters, in the model's shapes.

`optimizer.state.{param, exp_avg, exp_avg_sq}.<the parameter's key>` is a tensor of the parameter's whole shape, fp32.
Sharded optimizers hold a stretch of each flattened parameter. A stretch is a few boxes of the parameter, so each rank
writes its own and reads what it needs, whoever wrote it, and nothing is gathered. It is loaded to where it lies in
memory. Steps are the schedule's.
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

from megatron_ext.parallel.fp32_values import stored

MOMENTS = ("exp_avg", "exp_avg_sq")

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part of a tensor begins, and its sizes."""


@dataclass(frozen=True)
class Stretch:
    """Optimizer state of consecutive elements of a parameter, as a rank holds it.

    Attributes:
        parameter: this rank's, whole.
        start: index of the first of these elements in the flattened parameter.
        tensors: 1-D, fp32, by kind: `param`, the precise parameter, and `MOMENTS`. Views where the optimizer has them.
    """

    parameter: Tensor
    start: int
    tensors: dict[str, Tensor]


def placed_state(model_state: dict[str, Any], stretches: Iterable[Stretch], *, sharded: bool) -> dict[str, Any]:
    """Optimizer state placed in the whole model, for dist_checkpointing.

    Args:
        model_state: the model's sharded state dictionary, with what is `stored` of its parameters itself as data.
        stretches: what this rank holds.
        sharded: whether data-parallel ranks hold different stretches, or all the same.

    Returns:
        ShardedTensors that share memory with the stretches.
    """
    places: dict[int, list[ShardedTensor]] = {}
    for base in nested_values(model_state):
        if isinstance(base, (ShardedTensor, ShardedTensorFactory)):
            # One parameter may be parts that lie apart in the whole tensor: SwiGLU's gate and value.
            parts = base.build() if isinstance(base, ShardedTensorFactory) else [base]
            places[id(base.data)] = list(nested_values(parts))
    placed: dict[str, Any] = {}
    for stretch in stretches:
        for place in places[id(stored(stretch.parameter))]:
            for part in _parts_within(stretch, place, sharded):
                placed[f"{len(placed)}"] = part
    return placed


def _parts_within(stretch: Stretch, place: ShardedTensor, sharded: bool) -> Iterator[ShardedTensor]:
    """The boxes of a stretch that lie within one placed part of its parameter."""
    assert place.data is not None
    assert place.prepend_axis_num == 0, "layers are stored one by one"
    assert place.data.is_contiguous(), f"{place.key} is cut along its rows alone"
    begin = place.data.storage_offset() - stored(stretch.parameter).storage_offset()
    length = len(next(iter(stretch.tensors.values())))
    first, last = max(stretch.start, begin), min(stretch.start + length, begin + place.data.numel())
    for offset, shape in boxes(tuple(place.data.shape), first - begin, last - begin):
        start = begin - stretch.start + _flat_index(offset, tuple(place.data.shape))
        for kind, tensor in stretch.tensors.items():
            data = tensor.narrow(0, start, math.prod(shape)).view(shape)
            yield replace(
                place,
                key=f"optimizer.state.{kind}.{place.key}",
                data=data,
                dtype=data.dtype,
                local_shape=shape,
                global_offset=tuple(a + b for a, b in zip(place.global_offset, offset, strict=True)),
                axis_fragmentations=None,  # boxes of any size
                replica_id=_of_the_only_holder(place.replica_id) if sharded else place.replica_id,
                allow_shape_mismatch=False,
            )


def _of_the_only_holder(replica_id: Any) -> Any:
    """A model's replicas are numbered (pipeline, tensor, data-parallel rank); of the last there is one here."""
    return (*replica_id[:-1], 0) if isinstance(replica_id, tuple) else 0


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The fewest boxes, in order, that together are elements start .. stop - 1 of a row-major tensor."""
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
        yield from _of_row(first_whole - 1, shape, start, stop)
        return
    yield from _of_row(first_whole - 1, shape, start, first_whole * inner)
    if first_whole < last_whole:
        yield (first_whole, *(0,) * (len(shape) - 1)), (last_whole - first_whole, *shape[1:])
    yield from _of_row(last_whole, shape, last_whole * inner, stop)


def _of_row(row: int, shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    before = row * math.prod(shape[1:])
    for offset, size in boxes(shape[1:], start - before, stop - before):
        yield (row, *offset), (1, *size)


def _flat_index(offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
    return sum(o * math.prod(shape[dim + 1 :]) for dim, o in enumerate(offset))


def make_moments(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor] | None = None) -> None:
    """Give torch's AdamW the state that it makes at its first step, so that there is something to load into.

    Args:
        optimizer: torch's AdamW.
        parameters: that it will update, where its groups do not hold them; None: those of its groups.
    """
    for parameter in parameters or [p for group in optimizer.param_groups for p in group["params"]]:
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
            }


def set_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Let every parameter's Adam have done as many steps; a tensor each, as AdamW adds to every one in place."""
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = torch.full_like(state["step"], steps)
    for group in optimizer.param_groups:  # fused optimizers keep it here
        if "step" in group:
            is_tensor = isinstance(group["step"], Tensor)
            group["step"] = torch.full_like(group["step"], steps) if is_tensor else steps
