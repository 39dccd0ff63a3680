"""Limits on the autotuning of Triton kernels, which takes most of an hour with all of fla's configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

WARM_UP_MS, TRIAL_MS = 5, 25
"""Milliseconds of warm-up and measurement per configuration; Triton's defaults are 25 and 100."""


def limit_tuning(max_configs: int) -> None:
    """Limit the autotuner to some evenly spaced configurations, each measured briefly, for the rest of the process.

    Args:
        max_configs: maximum number of configurations per kernel.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    prune = Autotuner.prune_configs

    def prune_evenly(self: Autotuner, *args: Any, **kwargs: Any) -> list[Any]:
        return evenly_spaced(list(prune(self, *args, **kwargs)), max_configs)

    def bench_briefly(kernel_call: Callable[[], Any], quantiles: Sequence[float]) -> Any:
        return do_bench(kernel_call, warmup=WARM_UP_MS, rep=TRIAL_MS, quantiles=quantiles)

    Autotuner.prune_configs = prune_evenly
    Autotuner.do_bench = property(lambda _: bench_briefly)


def evenly_spaced(items: Sequence[Any], max_configs: int) -> list[Any]:
    """Return at most `max_configs` of the items, each from the middle of an equal share."""
    count = min(max_configs, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]
