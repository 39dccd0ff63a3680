"""Comparison of step times under several optimizers, in alternation in the same processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.bench.run_report import RunReport
from megatron_ext.bench.steps import TimedRun
from megatron_ext.config.schema import RunConfig
from megatron_ext.platform.device import Platform
from megatron_ext.utils.markdown import table

WARM_UP_STEPS = 3
"""Untimed steps of each run first, in which kernels are compiled and Adam's moments created."""


def measure(
    configs: Mapping[str, RunConfig],
    vocabulary: int,
    groups: ProcessGroupCollection,
    platform: Platform,
    *,
    rounds: int,
    steps: int,
) -> dict[str, list[float]]:
    """Train the runs in alternation, with the order reversed in every other round; a collective call.

    Args:
        configs: of the runs, by name. All are in memory at once.
        vocabulary: vocabulary size of the model.
        groups: process groups.
        platform: of this process.
        rounds: number of rounds.
        steps: timed per round, after one untimed step.

    Returns:
        Seconds per step by run: the median of each round.
    """
    runs = {name: TimedRun(config, vocabulary, groups, platform) for name, config in configs.items()}
    for run in runs.values():
        for _ in range(WARM_UP_STEPS):
            run.time_call(run.train)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            run = runs[name]
            run.time_call(run.train)
            seconds[name].append(median(run.time_call(run.train) for _ in range(steps)))
    return seconds


@dataclass(frozen=True, kw_only=True)
class OptimizerReport(RunReport):
    """Comparison of optimizers.

    Attributes:
        steps: timed per round.
        seconds: see `measure`; the first optimizer is the reference.
    """

    stem = "optimizers"

    steps: int
    seconds: dict[str, list[float]]

    def numbers(self) -> dict[str, Any]:
        """Return all numbers, in seconds."""
        return {"steps": self.steps, "seconds": self.seconds, "beside_first": ratios_to_first(self.seconds)}

    def about(self) -> str:
        """Describe the number of rounds and steps."""
        rounds = len(next(iter(self.seconds.values())))
        return f". Medians of {rounds} rounds of {self.steps} steps."

    def table(self) -> list[str]:
        """Return a table with a row per optimizer."""
        ratios = ratios_to_first(self.seconds)
        rows = [
            (
                name,
                f"{1e3 * median(seconds):.1f}",
                f"{median(ratios[name]):.3f}",
                f"{min(ratios[name]):.3f} to {max(ratios[name]):.3f}",
            )
            for name, seconds in self.seconds.items()
        ]
        return table(("optimizer", "ms per step", f"ratio to {next(iter(self.seconds))}", "range over rounds"), rows)


def ratios_to_first(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the ratios of step times to those of the first optimizer in the same round, by name."""
    first = next(iter(seconds.values()))
    return {name: [a / b for a, b in zip(values, first, strict=True)] for name, values in seconds.items()}
