"""How much Triton's kernels tune themselves: with all of fla's configurations, for the better part of an hour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

WARM_UP_MS, TRIAL_MS = 5, 25
"""That a configuration is tried for; Triton itself takes 25 and 100."""


def limit_tuning(most: int) -> None:
    """From now on have every kernel that tunes itself try some of its configurations, evenly spaced, and briefly.

    Args:
        most: how many, at most.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    prune = Autotuner.prune_configs

    def some(self: Autotuner, *args: Any, **more: Any) -> list[Any]:
        return evenly_spaced(list(prune(self, *args, **more)), most)

    def briefly(kernel_call: Callable[[], Any], quantiles: Sequence[float]) -> Any:
        return do_bench(kernel_call, warmup=WARM_UP_MS, rep=TRIAL_MS, quantiles=quantiles)

    Autotuner.prune_configs = some
    Autotuner.do_bench = property(lambda _: briefly)


def evenly_spaced(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, each from the middle of its share of them."""
    count = min(most, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]
