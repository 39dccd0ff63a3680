"""Which cases of a test run by default: a covering array, or chosen ones, instead of the full product.

`make test-exhaustive` sets SELECTRON_TEST_EXHAUSTIVE and runs every case.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from typing import TypeVar

import torch

Case = TypeVar("Case")

EXHAUSTIVE = "SELECTRON_TEST_EXHAUSTIVE" in os.environ


def cases(every: Iterable[Case], default: Iterable[Case]) -> list[Case]:
    """Return the default cases, or every case in `make test-exhaustive`.

    Raises:
        ValueError: a default case is not in `every`.
    """
    every, default = list(every), list(default)
    if unknown := [case for case in default if case not in every]:
        raise ValueError(f"not among every case: {unknown}")
    return every if EXHAUSTIVE else default


def kernel_cases(every: Iterable[Case], default: Iterable[Case]) -> list[Case]:
    """Return every case on a GPU. Otherwise choose by `cases`, because Triton's interpreter takes seconds for each."""
    every = list(every)
    chosen = cases(every, default)
    return every if torch.cuda.is_available() else chosen


def cover(
    candidates: Sequence[Case],
    pairs_of: Callable[[Case], Set[Hashable]],
    wanted: Iterable[Hashable] | None = None,
) -> list[Case]:
    """Choose cases until every wanted pair is in one of them. Each time take the case with the most missing pairs.

    Args:
        candidates: cases to choose from.
        pairs_of: returns the pairs that a case holds.
        wanted: pairs to cover. None: all pairs of the candidates.

    Returns:
        The chosen cases in the order of `candidates`.
    """
    pairs = [pairs_of(case) for case in candidates]
    missing = set().union(*pairs) if wanted is None else set(wanted)
    chosen = set()
    while missing:
        best = max(range(len(pairs)), key=lambda index: len(pairs[index] & missing))  # the first of several
        if not pairs[best] & missing:
            raise ValueError(f"no candidate holds {sorted(map(str, missing))}")
        chosen.add(best)
        missing -= pairs[best]
    return [candidates[index] for index in sorted(chosen)]
