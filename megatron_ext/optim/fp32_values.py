"""fp32 values beside parameters (`parallel.fp32_values`), kept the same as the optimizer's own fp32 copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.parallel.fp32_values import fp32_values


class Master(NamedTuple):
    """Consecutive elements of a parameter as the optimizer of this rank holds them.

    Attributes:
        parameter: this rank's, whole.
        start: index of the first of these elements in the flattened parameter.
        values: fp32, 1-D.
    """

    parameter: Tensor
    start: int
    values: Tensor


def values_at(master: Master) -> Tensor:
    """The elements of a parameter's fp32 values that a master is of."""
    values = fp32_values(master.parameter)
    assert values is not None, "masters are asked for of such parameters alone"
    return values.view(-1)[master.start : master.start + len(master.values)]


def spread(parameters: Sequence[Tensor], masters: Iterable[Master], group: dist.ProcessGroup | None) -> None:
    """Write the optimizer's values into the fp32 values of parameters; a collective call where they are shared out.

    Args:
        parameters: all that have such values, in the same order on all ranks of the group.
        masters: what this rank's optimizer holds of them.
        group: ranks that hold different elements, each of them once; None: every rank holds all.
    """
    if not parameters:
        return
    shared_out = group is not None and group.size() > 1
    if shared_out:
        flat = torch.zeros(
            sum(p.numel() for p in parameters), dtype=torch.float32, device=_values(parameters[0]).device
        )
        parts = {id(p): part for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True)}
    for master in masters:
        if shared_out:
            parts[id(master.parameter)][master.start : master.start + len(master.values)] = master.values
        else:
            values_at(master).copy_(master.values)
    if shared_out:
        dist.all_reduce(flat, group=group)
        for parameter in parameters:
            _values(parameter).view(-1).copy_(parts[id(parameter)])


def _values(parameter: Tensor) -> Tensor:
    values = fp32_values(parameter)
    assert values is not None
    return values
