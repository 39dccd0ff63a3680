"""Limits on the autotuning of Triton kernels, which takes most of an hour with all of fla's configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

WARM_UP_MS, TRIAL_MS = 5, 25
"""Milliseconds of warm-up and measurement per configuration; Triton's defaults are 25 and 100."""


def limit_tuning(most: int) -> None:
    """Limit the autotuner to some evenly spaced configurations, each measured briefly, for the rest of the process.

    Args:
        most: maximum number of configurations per kernel.
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
    """Return at most `most` of the items, each from the middle of an equal share."""
    count = min(most, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]
