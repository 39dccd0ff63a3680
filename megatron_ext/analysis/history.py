"""What happened to runs: their steps, time, throughput, memory and starts, how their configurations differ, and which
shards they did without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from megatron_ext.analysis.cells import NOTHING, Cell, count, text
from megatron_ext.analysis.runs import Run
from megatron_ext.errors import UserError
from megatron_ext.events import launches, read_events
from megatron_ext.files import read_regular

SKIPPED = "skipped_shards.jsonl"
"""Of a run that did without some of its data: a line whenever that changed."""

NAMES = ("run.name", "run.dir")
"""Fields that differ between any two runs and say nothing."""

GIB = 2**30
_FILE = ConfigDict(extra="ignore")


@checked_dataclass(frozen=True, config=_FILE)
class Shard:
    """A shard that was skipped."""

    shard: str
    tokens: NonNegativeInt
    problem: str


@checked_dataclass(frozen=True, config=_FILE)
class Skipped:
    """A line of skipped_shards.jsonl: what a run did without after `step` steps."""

    step: NonNegativeInt
    tokens: NonNegativeInt
    samples_an_epoch: NonNegativeInt
    of_samples: NonNegativeInt
    shards: list[Shard]


def happened(run: Run) -> dict[str, Cell]:
    """A row of the table of what happened, by column."""
    done, planned = int(run.steps[-1]), int(run.config["training"]["steps"])
    rates = run.tokens_per_second[np.isfinite(run.tokens_per_second)]
    return {
        "steps": Cell(f"{count(done).text} of {count(planned).text}", done),
        "tokens": count(int(run.tokens[-1])),
        "parameters": count(run.size.parameters) if run.size else NOTHING,
        "time in steps": duration(run.seconds),
        "tokens/s (median)": count(round(float(np.median(rates)))) if rates.size else NOTHING,
        "of peak FLOP/s (median)": NOTHING if run.mfu is None else Cell(f"{100 * run.mfu:.1f} %", run.mfu),
        "peak memory a process": _memory(run.peak_memory),
        **_started(run.path),
    }


def _memory(peak: int | None) -> Cell:
    return NOTHING if peak is None else Cell(f"{peak / GIB:.2f} GiB", peak)


def _started(folder: Path) -> dict[str, Cell]:
    """Of the jobs of a launched run: how many, how often they started, and what happened last."""
    damaged: list[str] = []
    jobs = [read_events(launch, damaged) for launch in launches(folder)]
    events = [event for job in jobs for event in job]
    if not events:
        return {"jobs": NOTHING, "starts": NOTHING, "last event": NOTHING}
    note = f"; {len(damaged)} damaged lines in events.tsv" if damaged else ""
    starts = sum(event.is_start for event in events)
    last = events[-1]
    return {"jobs": count(len(jobs)), "starts": count(starts), "last event": text(f"{last.what} ({last.time}){note}")}


def duration(seconds: float) -> Cell:
    """Time in the largest unit that fits, and the next."""
    if not np.isfinite(seconds):
        return NOTHING
    whole = round(seconds)
    if whole < 60:
        return Cell(f"{seconds:.1f} s", seconds)
    for unit, smaller, size, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60)):
        if whole >= size:
            return Cell(f"{whole // size} {unit} {whole % size // part} {smaller}", seconds)
    return Cell(f"{whole // 60} min {whole % 60} s", seconds)


def differences(runs: Sequence[Run]) -> tuple[list[str], list[list[Cell]]]:
    """Fields of the configuration in which any two runs differ, and their values by run.

    What a mixer is set to differs from another setting of it, not from none of a run that is without it.
    """
    flat = [dict(_flatten(run.config)) for run in runs]
    fields = dict.fromkeys(field for one in flat for field in one if field not in NAMES)
    differing = []
    for field in fields:
        values = {one.get(field) for one in flat if field in one or not field.startswith("mixers.")}
        differing += [field] if len(values) > 1 else []
    return differing, [[_value(one.get(field)) for field in differing] for one in flat]


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Dotted fields, and their values as text."""
    flat: list[tuple[str, str]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat += _flatten(value, f"{prefix}{key}.")
        else:
            flat.append((f"{prefix}{key}", _plain(value)))
    return flat


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    return ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)


def _value(value: str | None) -> Cell:
    if value is None:
        return NOTHING
    try:
        return Cell(value, float(value))
    except ValueError:
        return text(value)


@dataclass(frozen=True)
class Without:
    """What a run did without for some of its steps.

    Attributes:
        record: since when, and what.
        until: last step of it; None: the run's end.
    """

    record: Skipped
    until: int | None


def skipped(run: Run) -> list[Without]:
    """What a run did without, in the order of its steps: a shard may have been whole again later.

    Raises:
        UserError: the file is damaged.
    """
    path = run.path / SKIPPED
    try:
        lines = read_regular(path).splitlines() if path.exists() else []
        records = [TypeAdapter(Skipped).validate_json(line) for line in lines]
    except (OSError, ValidationError):
        raise UserError(str(path), "is not what training has written", "restore the file or remove it") from None
    ends: list[int | None] = [*(record.step for record in records[1:]), None][: len(records)]
    return [Without(record, end) for record, end in zip(records, ends, strict=True) if record.shards]
