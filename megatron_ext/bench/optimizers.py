"""What a training step takes under one optimizer and another, in turn in the same processes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

from kernels.bench.report import machine_line, table
from megatron_ext.bench.steps import TimedRun
from megatron_ext.config.schema import RunConfig
from megatron_ext.files import write_whole
from megatron_ext.platform import Platform

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
class Report:
    """All of a comparison.

    Attributes:
        name: of the configuration.
        overrides: laid over it.
        processes: how many.
        machine: where it ran.
        steps: timed in a round.
        seconds: see `measure`; the first is what the others are beside.
    """

    name: str
    overrides: tuple[str, ...]
    processes: int
    machine: dict[str, str | None]
    steps: int
    seconds: dict[str, list[float]]


def beside_first(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """A step's time by that of the first in the same round; a list of rounds by name."""
    first = next(iter(seconds.values()))
    return {name: [a / b for a, b in zip(own, first, strict=True)] for name, own in seconds.items()}


def markdown(report: Report) -> str:
    """The table, with the machine above it."""
    ratios, first = beside_first(report.seconds), next(iter(report.seconds))
    rows = [
        (
            name,
            f"{1e3 * median(seconds):.1f}",
            f"{median(ratios[name]):.3f}",
            f"{min(ratios[name]):.3f} to {max(ratios[name]):.3f}",
        )
        for name, seconds in report.seconds.items()
    ]
    lines = [
        machine_line(report.machine),
        "",
        f"`{' '.join([report.name, *report.overrides])}`, {report.processes} processes. Medians of "
        f"{len(report.seconds[first])} rounds of {report.steps} steps.",
        "",
        *table(("optimizer", "ms a step", f"beside {first}", "in a round"), rows),
    ]
    return "\n".join(lines) + "\n"


def to_dict(report: Report) -> dict[str, Any]:
    """All numbers, in seconds."""
    return {
        "machine": report.machine,
        "configuration": report.name,
        "overrides": list(report.overrides),
        "processes": report.processes,
        "steps": report.steps,
        "seconds": report.seconds,
        "beside_first": beside_first(report.seconds),
    }


def write(report: Report, folder: Path) -> None:
    """Write optimizers.json and optimizers.md, each whole or not at all."""
    write_whole(folder / "optimizers.json", (json.dumps(to_dict(report), indent=1) + "\n").encode())
    write_whole(folder / "optimizers.md", markdown(report).encode())
