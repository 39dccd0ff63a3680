"""How much Triton's kernels tune themselves: with all of fla's configurations, for the better part of an hour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def limit_tuning(most: int) -> None:
    """From now on have every kernel that tunes itself try some of its configurations, evenly spaced.

    Args:
        most: how many, at most.
    """
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def some(self: Autotuner, *args: Any, **more: Any) -> list[Any]:
        return evenly_spaced(list(prune(self, *args, **more)), most)

    Autotuner.prune_configs = some


def evenly_spaced(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, each from the middle of its share of them."""
    count = min(most, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]
