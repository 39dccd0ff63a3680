"""A line on standard error that says how far a suite is."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from tqdm import tqdm


def progress(
    steps: Iterable[Any] | None, title: str, unit: str, *, total: int | None = None, is_shown: bool = True
) -> Any:
    """Tqdm's line around an iteration, on the first rank alone; it is gone at the end. A short one shows none.

    Args:
        steps: what is gone through; None: whoever asks updates the line.
        title: of the line.
        unit: what a step is called.
        total: steps there are, where they cannot be counted.
        is_shown: False: nothing is shown on any rank.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    hidden = not (is_shown and is_first)
    # A log file gets a line now and then.
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
        delay=interval,  # else a line of zeros comes first
    )
