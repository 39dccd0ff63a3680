"""Report of `selectron bench train` as JSON and as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from kernels.bench.timing import Ceilings
from megatron_ext.bench.run_report import RunReport
from megatron_ext.bench.train.measure import Measured, StepCounts
from megatron_ext.bench.train.step_trace import PARTS, PHASES
from megatron_ext.model.step_parts import COMMUNICATION, MODEL
from megatron_ext.utils.markdown import format_number, replace_nonfinite, table

COLUMNS = (
    "variant",
    "tokens/s",
    "min to max",
    "per process",
    "ms per step",
    "MFU",
    "allocated, GiB",
    "reserved, GiB",
    "parameters",
    "last loss",
    "host syncs per step",
)


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """Result of one variant.

    Attributes:
        name: name of the variant.
        overrides: overrides of the common configuration.
        config: whole configuration as plain sections; None: the configuration cannot be read.
        processes: number of processes that trained the variant.
        measured: measurements; None: there are none.
        failed: reason why there are no measurements, or why they are invalid; None: the variant succeeded.
        plain: True if the model was built by megatron-core alone.
        wall_seconds: seconds from the start of the variant's processes until all had exited; None: not started.
    """

    name: str
    overrides: tuple[str, ...]
    config: dict[str, Any] | None
    processes: int
    measured: Measured | None = None
    failed: str | None = None
    plain: bool = False
    wall_seconds: float | None = None

    def with_measurements(self, measured: Measured) -> TrainingRow:
        """Return a copy of the row with measurements, and with a failure if a loss is not finite."""
        nonfinite = [number for number, loss in enumerate(measured.losses, 1) if not math.isfinite(loss)]
        message = f"the loss of timed step {nonfinite[0]} is {measured.losses[nonfinite[0] - 1]}" if nonfinite else None
        return replace(self, measured=measured, failed=message)

    def with_failure(self, message: str) -> TrainingRow:
        """Return a copy of the row with a failure."""
        return replace(self, failed=message)

    @property
    def summary(self) -> str:
        """Short form of the result."""
        if self.failed is not None or self.measured is None:
            return f"failed: {self.failed}"
        return f"{_count(derived(self.measured, self.processes)['tokens_per_s'])} tokens/s"

    def to_dict(self) -> dict[str, Any]:
        """Return all measurements as plain values, in seconds and bytes unless a name contains another unit."""
        fields: dict[str, Any] = {
            "variant": self.name,
            "overrides": list(self.overrides),
            "processes": self.processes,
            "plain_megatron": self.plain,
            "took": self.wall_seconds,
            "configuration": self.config,
        }
        if self.failed is not None:
            fields["failed"] = self.failed
        if self.measured is not None:
            measured = asdict(self.measured)
            measured["losses"] = [replace_nonfinite(loss) for loss in self.measured.losses]
            fields |= {"measured": measured, "derived": derived(self.measured, self.processes)}
        return fields


def derived(measured: Measured, processes: int) -> dict[str, float | None]:
    """Return quantities derived from a variant's measurements, from the median, slowest and fastest timed step."""
    step = median(measured.seconds)
    rates = [measured.tokens / seconds for seconds in (step, max(measured.seconds), min(measured.seconds))]
    mfu = None if measured.peak_flops is None else measured.flops_per_token * rates[0] / measured.peak_flops
    return {
        "s_per_step": step,
        "tokens_per_s": rates[0],
        "tokens_per_s_min": rates[1],
        "tokens_per_s_max": rates[2],
        "tokens_per_s_per_process": rates[0] / processes,
        "mfu": mfu,
        "model_tflops_per_process": measured.flops_per_token * rates[0] / processes / 1e12,
    }


@dataclass(frozen=True, kw_only=True)
class TrainingReport(RunReport):
    """Report on the variants of a configuration.

    Attributes:
        ceilings: peak rates of one GPU, measured in the same benchmark; None: there is no GPU.
        step_counts: numbers of warm-up, timed and profiled steps.
        prepared: True if the configured data was read instead of random tokens.
        rows: results of the variants, in the order of the table.
    """

    stem = "train"

    ceilings: Ceilings | None
    step_counts: StepCounts
    prepared: bool
    rows: list[TrainingRow]

    def speed(self, row: TrainingRow) -> float | None:
        """Return the row's throughput divided by that of the first row; None if either was not measured."""
        first = self.rows[0].measured
        if first is None or row.measured is None:
            return None
        rates = [measured.tokens / median(measured.seconds) for measured in (row.measured, first)]
        return rates[0] / rates[1]

    def numbers(self) -> dict[str, Any]:
        """Return all rows, with the settings and ceilings."""
        ceilings = self.ceilings
        return {
            "ceilings": None
            if ceilings is None
            else {"tflops": ceilings.operations / 1e12, "gb_per_s": ceilings.bytes / 1e9},
            "data": "prepared" if self.prepared else "random",
            "amount": asdict(self.step_counts),
            "rows": [row.to_dict() | {"speed_over_first": self.speed(row)} for row in self.rows],
        }

    def about(self) -> str:
        """Describe the number of steps, the data and the ceilings."""
        counts, data = self.step_counts, "the configuration's own data" if self.prepared else "random tokens"
        text = f". Medians of {counts.steps} steps after {counts.warm_up}, on {data}. Memory: maximum over ranks."
        if self.ceilings is None:
            return text
        best = f"{self.ceilings.operations / 1e12:.0f} TFLOP/s"
        copy = f"{self.ceilings.bytes / 1e12:.2f} TB/s (read + written)"
        return f"{text} Measured peak rates of a GPU: bf16 product of 8192 x 8192 matrices {best}, copy {copy}."

    def table(self) -> list[str]:
        """Return a table with a row per variant and, for profiled variants, tables of the parts of a step."""
        columns = (*COLUMNS, f"speed over {self.rows[0].name}") if self.rows else COLUMNS
        lines = table(columns, [_cells(row, self.speed(row)) for row in self.rows])
        profiled = [row for row in self.rows if row.measured is not None and row.measured.breakdown is not None]
        start_lines = [_start_line(row, row.measured) for row in self.rows if row.measured is not None]
        lines += ["", *start_lines] if start_lines else []
        if not profiled:
            return lines
        parts = table(("ms of a profiled step", "whole", *PARTS), [_part_cells(row) for row in profiled])
        phases = table(
            ("ms of the model's parts", "pass", *MODEL), [cells for row in profiled for cells in _phase_cells(row)]
        )
        return [*lines, "", _ABOUT_PARTS, "", *parts, "", *phases, *_notes(profiled)]


_ABOUT_PARTS = (
    "Parts of a step in milliseconds: means over all ranks and over the steps that were profiled after the timed ones. "
    "Profiled steps are slower. The parts add up to the whole step. Time counts for the part of the kernel that runs, "
    "for communication if nothing else runs, and for data if the GPU waits for it. Without a GPU it counts for the "
    "part that the CPU works on. Recomputation counts for the recomputed part."
)


def _cells(row: TrainingRow, speed: float | None) -> list[str]:
    if row.measured is None:
        return [row.name, f"failed: {row.failed}", *[""] * (len(COLUMNS) - 1)]
    measured, numbers = row.measured, derived(row.measured, row.processes)
    mfu, reserved, breakdown = numbers["mfu"], measured.memory.reserved, measured.breakdown
    syncs = None if breakdown is None or breakdown.host_syncs is None else sum(breakdown.host_syncs.values())
    return [
        row.name if row.failed is None else f"{row.name}, failed: {row.failed}",
        _count(numbers["tokens_per_s"]),
        f"{_count(numbers['tokens_per_s_min'])} to {_count(numbers['tokens_per_s_max'])}",
        _count(numbers["tokens_per_s_per_process"]),
        format_number(1e3 * median(measured.seconds)),
        "" if mfu is None else f"{100 * mfu:.1f} %",
        format_number(measured.memory.allocated / 2**30),
        "" if reserved is None else format_number(reserved / 2**30),
        f"{measured.parameters['parameters']:,}",
        f"{measured.losses[-1]:.4f}",
        "" if syncs is None else f"{syncs:g}",
        "" if speed is None else f"{format_number(speed)}x",
    ]


def _start_line(row: TrainingRow, measured: Measured) -> str:
    assert row.wall_seconds is not None
    seconds = (row.wall_seconds, measured.starting, measured.building, measured.first_step)
    total, start, build, first = map(format_number, seconds)
    return (
        f"* {row.name} took {total} s, of which {start} s to start the processes, {build} s to build model and "
        f"optimizer, and {first} s for the first step including compilation"
    )


def _count(number: float | None) -> str:
    assert number is not None
    return f"{number:,.0f}"


def _part_cells(row: TrainingRow) -> list[str]:
    assert row.measured is not None
    assert row.measured.breakdown is not None
    breakdown = row.measured.breakdown
    shares = [f"{_ms(breakdown.parts[part])} ({100 * breakdown.parts[part] / breakdown.step:.0f} %)" for part in PARTS]
    return [row.name, _ms(breakdown.step), *shares]


def _phase_cells(row: TrainingRow) -> list[list[str]]:
    assert row.measured is not None
    assert row.measured.breakdown is not None
    phases = row.measured.breakdown.phases
    return [[row.name, phase, *(_ms(phases[part][phase]) for part in MODEL)] for phase in PHASES]


def _ms(seconds: float) -> str:
    return format_number(1e3 * seconds)


def _notes(profiled: Sequence[TrainingRow]) -> list[str]:
    """Return lines about overlapped communication, the longest idle time and the host's waits for the GPU."""
    lines = []
    for row in profiled:
        assert row.measured is not None
        assert row.measured.breakdown is not None
        breakdown = row.measured.breakdown
        if breakdown.communication:
            overlapped = breakdown.communication - breakdown.parts[COMMUNICATION]
            lines.append(
                f"* {row.name}: communication {_ms(breakdown.communication)} ms, {_ms(overlapped)} ms of it overlapped"
            )
        if breakdown.longest_idle is not None:
            rank = [each.longest_idle for each in row.measured.breakdown_by_rank].index(breakdown.longest_idle)
            longest, host = _ms(breakdown.longest_idle.seconds), breakdown.longest_idle.host
            lines.append(
                f"* {row.name}: longest idle interval {longest} ms, on rank {rank}, while the host was in {host}"
            )
        lines += [f"* {row.name}: {count:g} x {location}" for location, count in (breakdown.host_syncs or {}).items()]
    return ["", *lines] if lines else []
