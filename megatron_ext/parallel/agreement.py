"""What all ranks must think alike of."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from megatron_ext.errors import UserError


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
    errors: list[UserError | None] = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    first = next((one for one in errors if one is not None), None)
    if first is not None:
        raise first
