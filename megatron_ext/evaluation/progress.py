"""Progress line on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from tqdm import tqdm


def progress(
    steps: Iterable[Any] | None, title: str, unit: str, *, total: int | None = None, is_shown: bool = True
) -> Any:
    """Return a tqdm progress line, shown only on the first rank and removed at the end.

    An iteration that ends within the first update interval shows no line.

    Args:
        steps: iterable to wrap; None: the caller updates the line.
        title: title of the line.
        unit: name of a step.
        total: number of steps, if `steps` has no length.
        is_shown: False disables the line on all ranks.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    hidden = not (is_shown and is_first)
    # A log file gets a line every 20 seconds only.
    interval = 0.5 if sys.stderr.isatty() else 20.0
    return tqdm(
        steps,
        desc=title,
        unit=unit,
        total=total,
        file=sys.stderr,
        disable=hidden,
        leave=False,
        mininterval=interval,
        delay=interval,  # otherwise a line of zeros comes first
    )
