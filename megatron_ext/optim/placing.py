"""Where a flat piece of a parameter lies in the whole model's tensor, for dist_checkpointing.

An optimizer that is sharded over data-parallel ranks cuts its state where the flat buffer ends, in the middle of a row.
Megatron's own way to save that is to gather all of it on every rank (`fully_reshardable`), through the CPU. A piece of
a row-major tensor is a few boxes, though, each contiguous in the piece; a box has a place in the whole tensor like any
shard. So each rank saves and loads its own part, in place, and no two ranks talk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes along each dimension."""


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that elements start .. stop of a flattened tensor fill, in the order of the elements.

    Args:
        shape: of the tensor.
        start: first element.
        stop: one past the last.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first_whole, end_of_whole = -(-start // row), stop // row
    if first_whole > end_of_whole:  # all within one row
        yield from _in_row(shape, end_of_whole, start, stop)
        return
    yield from _in_row(shape, first_whole - 1, start, first_whole * row)
    if first_whole < end_of_whole:
        yield (first_whole, *[0] * (len(shape) - 1)), (end_of_whole - first_whole, *shape[1:])
    yield from _in_row(shape, end_of_whole, end_of_whole * row, stop)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    before = index * math.prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], start - before, stop - before):
        yield (index, *offsets), (1, *sizes)


def placed(
    parameter: ShardedTensor | ShardedTensorFactory,
    start: int,
    stop: int,
    states: dict[str, Tensor],
    replica_id: tuple[int, ...],
) -> dict[str, list[ShardedTensor]]:
    """Flat pieces of a parameter's optimizer state as shards of whole tensors; they share the pieces' memory.

    Args:
        parameter: the parameter's place in the whole model.
        start: element of the flattened parameter of this rank at which the pieces begin.
        stop: one past their last element.
        states: by the prefix of its key in the checkpoint, e.g. `optimizer.state.exp_avg`, a flat piece [stop - start].
        replica_id: of the pieces: which rank's copy is saved, where several have the same.
    """
    found: dict[str, list[ShardedTensor]] = {prefix: [] for prefix in states}
    for first, part in _parts(parameter):
        for offsets, sizes in boxes(part.local_shape, max(start - first, 0), min(stop - first, part.data.numel())):
            within = first + sum(o * s for o, s in zip(offsets, _strides(part.local_shape), strict=True)) - start
            for prefix, flat in states.items():
                box = flat[within : within + math.prod(sizes)]
                found[prefix].append(_shard(part, f"{prefix}.{part.key}", box, offsets, sizes, replica_id))
    return found


def _parts(parameter: ShardedTensor | ShardedTensorFactory) -> list[tuple[int, ShardedTensor]]:
    """What is saved of a parameter, each with the element of the flattened parameter at which it begins.

    Several where Megatron keeps parts of a parameter apart, as the gate and the value of a SwiGLU.
    """
    if isinstance(parameter, ShardedTensor):
        return [(0, parameter)]
    whole, found = parameter.data, []
    for part in nested_values(parameter.build()):
        data = part.data
        assert data.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr(), f"{part.key} is no view"
        assert data.is_contiguous(), f"{part.key} does not lie in one piece"
        found.append((data.storage_offset() - whole.storage_offset(), part))
    return found


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _shard(
    part: ShardedTensor,
    key: str,
    flat: Tensor,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    replica_id: tuple[int, ...],
) -> ShardedTensor:
    before = part.prepend_axis_num  # dimensions that the whole tensor has and this rank's does not: the layer's number
    inner = (o + more for o, more in zip(part.global_offset[before:], offsets, strict=True))
    return ShardedTensor(
        key=key,
        data=flat.detach().view((1,) * before + sizes),
        dtype=flat.dtype,
        local_shape=(1,) * before + sizes,
        global_shape=part.global_shape,
        global_offset=(*part.global_offset[:before], *inner),
        axis_fragmentations=None,  # boxes of any size
        replica_id=replica_id,
        allow_shape_mismatch=part.allow_shape_mismatch,
    )
