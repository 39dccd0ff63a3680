"""History of runs: steps, time, throughput, memory, job starts, configuration differences and skipped shards."""

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
from megatron_ext.run_folder.launch_events import launch_folders, read_events
from megatron_ext.utils.atomic_files import read_regular
from megatron_ext.utils.errors import UserError

SKIPPED_SHARDS = "skipped_shards.jsonl"
"""File of a run that skipped a part of its data, with a line for each change of the skipped shards."""

IGNORED_FIELDS = ("run.name", "run.dir")
"""Fields that always differ between runs and carry no information."""

BYTES_PER_GIB = 2**30
_FILE = ConfigDict(extra="ignore")


@checked_dataclass(frozen=True, config=_FILE)
class Shard:
    """Skipped data shard, with the reason."""

    shard: str
    tokens: NonNegativeInt
    problem: str


@checked_dataclass(frozen=True, config=_FILE)
class SkippedShards:
    """Line of skipped_shards.jsonl: the shards that a run skips after `step` steps."""

    step: NonNegativeInt
    tokens: NonNegativeInt
    samples_an_epoch: NonNegativeInt
    of_samples: NonNegativeInt
    shards: list[Shard]


def history_row(run: Run) -> dict[str, Cell]:
    """Return a run's row of the history table, by column."""
    completed, planned = int(run.steps[-1]), int(run.config["training"]["steps"])
    rates = run.tokens_per_second[np.isfinite(run.tokens_per_second)]
    return {
        "steps": Cell(f"{count(completed).text} of {count(planned).text}", completed),
        "tokens": count(int(run.tokens[-1])),
        "parameters": count(run.size.parameters) if run.size else NOTHING,
        "time in steps": duration(run.seconds),
        "tokens/s (median)": count(round(float(np.median(rates)))) if rates.size else NOTHING,
        "of peak FLOP/s (median)": NOTHING if run.mfu is None else Cell(f"{100 * run.mfu:.1f} %", run.mfu),
        "peak memory per process": _memory_cell(run.peak_memory),
        **_job_cells(run.path),
    }


def _memory_cell(peak: int | None) -> Cell:
    return NOTHING if peak is None else Cell(f"{peak / BYTES_PER_GIB:.2f} GiB", peak)


def _job_cells(folder: Path) -> dict[str, Cell]:
    """Return the number of jobs of a launched run, their starts and the last event."""
    damaged: list[str] = []
    jobs = [read_events(launch, damaged) for launch in launch_folders(folder)]
    events = [event for job in jobs for event in job]
    if not events:
        return {"jobs": NOTHING, "starts": NOTHING, "last event": NOTHING}
    note = f"; {len(damaged)} damaged lines in events.tsv" if damaged else ""
    starts = sum(event.is_start for event in events)
    last = events[-1]
    return {
        "jobs": count(len(jobs)),
        "starts": count(starts),
        "last event": text(f"{last.description} ({last.time}){note}"),
    }


def duration(seconds: float) -> Cell:
    """Format a time in seconds, minutes, hours or days, with the next smaller unit for times from a minute."""
    if not np.isfinite(seconds):
        return NOTHING
    rounded = round(seconds)
    if rounded < 60:
        return Cell(f"{seconds:.1f} s", seconds)
    for unit, smaller, seconds_per_unit, seconds_per_smaller in (("d", "h", 86400, 3600), ("h", "min", 3600, 60)):
        if rounded >= seconds_per_unit:
            larger, remainder = divmod(rounded, seconds_per_unit)
            return Cell(f"{larger} {unit} {remainder // seconds_per_smaller} {smaller}", seconds)
    return Cell(f"{rounded // 60} min {rounded % 60} s", seconds)


def differences(runs: Sequence[Run]) -> tuple[list[str], list[list[Cell]]]:
    """Return the configuration fields in which any two runs differ, and their values by run.

    A mixer's field counts as different only between runs that have the field.
    """
    flat_configs = [dict(_flatten(run.config)) for run in runs]
    fields = dict.fromkeys(field for config in flat_configs for field in config if field not in IGNORED_FIELDS)
    differing = []
    for field in fields:
        values = {config.get(field) for config in flat_configs if field in config or not field.startswith("mixers.")}
        differing += [field] if len(values) > 1 else []
    return differing, [[_value_cell(config.get(field)) for field in differing] for config in flat_configs]


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return the leaf fields with dotted names, and their values as text."""
    flat: list[tuple[str, str]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat += _flatten(value, f"{prefix}{key}.")
        else:
            flat.append((f"{prefix}{key}", _format_value(value)))
    return flat


def _format_value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    return ", ".join(map(_format_value, value)) if isinstance(value, list | tuple) else str(value)


def _value_cell(value: str | None) -> Cell:
    if value is None:
        return NOTHING
    try:
        return Cell(value, float(value))
    except ValueError:
        return text(value)


@dataclass(frozen=True)
class SkippedRange:
    """Shards that a run skipped for a range of steps.

    Attributes:
        record: first step and shards.
        until: last step; None for the end of the run.
    """

    record: SkippedShards
    until: int | None


def read_skipped(run: Run) -> list[SkippedRange]:
    """Read the skipped shards of a run in the order of its steps. A shard may become readable again later.

    Raises:
        UserError: the file is damaged.
    """
    path = run.path / SKIPPED_SHARDS
    try:
        lines = read_regular(path).splitlines() if path.exists() else []
        records = [TypeAdapter(SkippedShards).validate_json(line) for line in lines]
    except (OSError, ValidationError):
        raise UserError(str(path), "was not written by training", "restore the file or remove it") from None
    ends: list[int | None] = [*(record.step for record in records[1:]), None][: len(records)]
    return [SkippedRange(record, end) for record, end in zip(records, ends, strict=True) if record.shards]
