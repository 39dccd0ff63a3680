"""What a training step takes under one optimizer and another, in turn in the same processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.bench.run_report import RunReport
from megatron_ext.bench.steps import TimedRun
from megatron_ext.config.schema import RunConfig
from megatron_ext.platform import Platform
from megatron_ext.reports import table

WARM_UP = 3
"""Steps of each run before any is timed: kernels and Adam's moments are made."""


def measure(
    configs: Mapping[str, RunConfig],
    vocabulary: int,
    groups: ProcessGroupCollection,
    platform: Platform,
    *,
    rounds: int,
    steps: int,
) -> dict[str, list[float]]:
    """Train the runs in turn, in every other round the last one first; a collective call.

    Args:
        configs: of the runs, by name; all have their place in memory at once.
        vocabulary: tokens of the model.
        groups: process groups.
        platform: where this runs.
        rounds: how often each has its turn.
        steps: timed in a round, after one that is not.

    Returns:
        Seconds a step by run: the median of each round.
    """
    runs = {name: TimedRun(config, vocabulary, groups, platform) for name, config in configs.items()}
    for run in runs.values():
        for _ in range(WARM_UP):
            run.timed(run.train)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            run = runs[name]
            run.timed(run.train)
            seconds[name].append(median(run.timed(run.train) for _ in range(steps)))
    return seconds


@dataclass(frozen=True, kw_only=True)
class Report(RunReport):
    """A comparison of optimizers.

    Attributes:
        steps: timed in a round.
        seconds: see `measure`; the first is what the others are beside.
    """

    stem = "optimizers"

    steps: int
    seconds: dict[str, list[float]]

    def numbers(self) -> dict[str, Any]:
        """In seconds."""
        return {"steps": self.steps, "seconds": self.seconds, "beside_first": beside_first(self.seconds)}

    def about(self) -> str:
        """Rounds and their steps."""
        rounds = len(next(iter(self.seconds.values())))
        return f". Medians of {rounds} rounds of {self.steps} steps."

    def table(self) -> list[str]:
        """A row an optimizer."""
        ratios = beside_first(self.seconds)
        rows = [
            (
                name,
                f"{1e3 * median(seconds):.1f}",
                f"{median(ratios[name]):.3f}",
                f"{min(ratios[name]):.3f} to {max(ratios[name]):.3f}",
            )
            for name, seconds in self.seconds.items()
        ]
        return table(("optimizer", "ms a step", f"beside {next(iter(self.seconds))}", "in a round"), rows)


def beside_first(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """A step's time by that of the first in the same round; a list of rounds by name."""
    first = next(iter(seconds.values()))
    return {name: [a / b for a, b in zip(own, first, strict=True)] for name, own in seconds.items()}
