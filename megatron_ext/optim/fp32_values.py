"""Synchronisation of the parameters' fp32 values (`parallel.fp32_values`) with the optimizer's own fp32 copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.parallel.fp32_values import fp32_values


class Master(NamedTuple):
    """Optimizer's fp32 copy of consecutive elements of a parameter, on this rank.

    Attributes:
        parameter: whole parameter of this rank's model shard.
        start: index in the flattened parameter of the first of these elements.
        values: fp32 copy, 1-D.
    """

    parameter: Tensor
    start: int
    values: Tensor


def values_at(master: Master) -> Tensor:
    """Return the elements of a parameter's fp32 values that correspond to a master."""
    values = fp32_values(master.parameter)
    assert values is not None, "the parameter of a master has no fp32 values"
    return values.view(-1)[master.start : master.start + len(master.values)]


def write_fp32_values(parameters: Sequence[Tensor], masters: Iterable[Master], group: dist.ProcessGroup | None) -> None:
    """Write the optimizer's fp32 copies to the parameters' fp32 values; a collective call if the copies are sharded.

    Args:
        parameters: all parameters with fp32 values, in the same order on all ranks of the group.
        masters: fp32 copies that this rank's optimizer holds.
        group: ranks over which the copies are sharded, without overlap; None if every rank holds all copies.
    """
    if not parameters:
        return
    is_sharded = group is not None and group.size() > 1
    if is_sharded:
        flat = torch.zeros(
            sum(p.numel() for p in parameters), dtype=torch.float32, device=_require_fp32_values(parameters[0]).device
        )
        shards = {
            id(p): shard for p, shard in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True)
        }
    for master in masters:
        if is_sharded:
            shards[id(master.parameter)][master.start : master.start + len(master.values)] = master.values
        else:
            values_at(master).copy_(master.values)
    if is_sharded:
        dist.all_reduce(flat, group=group)
        for parameter in parameters:
            _require_fp32_values(parameter).view(-1).copy_(shards[id(parameter)])


def _require_fp32_values(parameter: Tensor) -> Tensor:
    values = fp32_values(parameter)
    assert values is not None
    return values
