"""What all ranks must think alike of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from megatron_ext.errors import UserError

T = TypeVar("T")


def on_every_rank(check: Callable[[], object]) -> None:
    """Run a check whose work the ranks share; if it fails on any, fail on all with the first one's error.

    A collective call; without a process group, this process is all there is.

    Args:
        check: finds nothing, or raises a `UserError`.

    Raises:
        UserError: the error of the first rank that has one.
    """
    error: UserError | None = None
    try:
        check()
    except UserError as found:
        error = found
    first = next((one for one in from_every_rank(error) if one is not None), None)
    if first is not None:
        raise first


def from_every_rank(value: T) -> list[T]:
    """What each rank has, in the order of the ranks, on all of them.

    A collective call; without a process group, this process is all there is.

    Args:
        value: this rank's; it travels as a pickle.
    """
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return cast(list[T], values)
