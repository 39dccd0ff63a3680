"""Report of `selectron bench train` as JSON and as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from kernels.bench.timing import Ceilings
from megatron_ext.bench.run_report import RunReport
from megatron_ext.bench.train.measure import Amount, Measured
from megatron_ext.bench.train.step_trace import PARTS, PHASES
from megatron_ext.model.step_parts import COMMUNICATION, MODEL
from megatron_ext.utils.markdown import format_number, replace_nonfinite, table

COLUMNS = (
    "variant",
    "tokens/s",
    "min to max",
    "a process",
    "ms a step",
    "MFU",
    "allocated, GiB",
    "reserved, GiB",
    "parameters",
    "last loss",
    "host syncs a step",
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
        took: seconds from the start of the variant's processes until all had exited; None: they were not started.
    """

    name: str
    overrides: tuple[str, ...]
    config: dict[str, Any] | None
    processes: int
    measured: Measured | None = None
    failed: str | None = None
    plain: bool = False
    took: float | None = None

    def with_numbers(self, measured: Measured) -> TrainingRow:
        """Return a copy of the row with measurements, and with a failure if a loss is not finite."""
        wrong = [number for number, loss in enumerate(measured.losses, 1) if not math.isfinite(loss)]
        said = f"the loss of timed step {wrong[0]} is {measured.losses[wrong[0] - 1]}" if wrong else None
        return replace(self, measured=measured, failed=said)

    def with_failure(self, said: str) -> TrainingRow:
        """Return a copy of the row with a failure."""
        return replace(self, failed=said)

    @property
    def summary(self) -> str:
        """Short form of the result."""
        if self.failed is not None or self.measured is None:
            return f"failed: {self.failed}"
        return f"{_count(derived(self.measured, self.processes)['tokens_per_s'])} tokens/s"

    def to_dict(self) -> dict[str, Any]:
        """Return all measurements as plain values, in seconds and bytes unless a name contains another unit."""
        found: dict[str, Any] = {
            "variant": self.name,
            "overrides": list(self.overrides),
            "processes": self.processes,
            "plain_megatron": self.plain,
            "took": self.took,
            "configuration": self.config,
        }
        if self.failed is not None:
            found["failed"] = self.failed
        if self.measured is not None:
            measured = asdict(self.measured)
            measured["losses"] = [replace_nonfinite(loss) for loss in self.measured.losses]
            found |= {"measured": measured, "derived": derived(self.measured, self.processes)}
        return found


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
        amount: numbers of warm-up, timed and profiled steps.
        prepared: True if the configured data was read instead of random tokens.
        rows: results of the variants, in the order of the table.
    """

    stem = "train"

    ceilings: Ceilings | None
    amount: Amount
    prepared: bool
    rows: list[TrainingRow]

    def speed(self, row: TrainingRow) -> float | None:
        """Return the row's throughput divided by that of the first row; None if either was not measured."""
        first = self.rows[0].measured
        if first is None or row.measured is None:
            return None
        rates = [one.tokens / median(one.seconds) for one in (row.measured, first)]
        return rates[0] / rates[1]

    def numbers(self) -> dict[str, Any]:
        """Return all rows, with the settings and ceilings."""
        ceilings = self.ceilings
        return {
            "ceilings": None
            if ceilings is None
            else {"tflops": ceilings.operations / 1e12, "gb_per_s": ceilings.bytes / 1e9},
            "data": "prepared" if self.prepared else "random",
            "amount": asdict(self.amount),
            "rows": [row.to_dict() | {"speed_over_first": self.speed(row)} for row in self.rows],
        }

    def about(self) -> str:
        """Describe the number of steps, the data and the ceilings."""
        amount, data = self.amount, "the configuration's own data" if self.prepared else "random tokens"
        said = f". Medians of {amount.steps} steps after {amount.warm_up}, on {data}; memory of the rank with most."
        if self.ceilings is None:
            return said
        best = f"{self.ceilings.operations / 1e12:.0f} TFLOP/s"
        copy = f"{self.ceilings.bytes / 1e12:.2f} TB/s (read + written)"
        return f"{said} Measured ceilings of a GPU: bf16 product of 8192 x 8192 matrices {best}, copy {copy}."

    def table(self) -> list[str]:
        """Return a table with a row per variant and, for profiled variants, tables of the parts of a step."""
        columns = (*COLUMNS, f"speed over {self.rows[0].name}") if self.rows else COLUMNS
        lines = table(columns, [_cells(row, self.speed(row)) for row in self.rows])
        profiled = [row for row in self.rows if row.measured is not None and row.measured.breakdown is not None]
        begun = [_start(row, row.measured) for row in self.rows if row.measured is not None]
        lines += ["", *begun] if begun else []
        if not profiled:
            return lines
        parts = table(("ms of a profiled step", "whole", *PARTS), [_part_cells(row) for row in profiled])
        phases = table(
            ("ms of the model's parts", "in", *MODEL), [cells for row in profiled for cells in _phase_cells(row)]
        )
        return [*lines, "", _ABOUT_PARTS, "", *parts, "", *phases, *_lines_below(profiled)]


_ABOUT_PARTS = (
    "Parts of a step, in milliseconds of steps that were profiled after the timed ones, and so took longer; the mean "
    "of all ranks. They add up to the whole. An instant belongs to the kernel that runs, to communication where "
    "nothing else does, to the data where the GPU waits for them; without a GPU to what the processor is at. What is "
    "computed again for the backward pass is of its own part."
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


def _start(row: TrainingRow, measured: Measured) -> str:
    assert row.took is not None
    took, started, built, first = map(
        format_number, (row.took, measured.starting, measured.building, measured.first_step)
    )
    return (
        f"* {row.name} took {took} s: {started} s until its ranks had met, {built} s until model and optimizer were "
        f"there, {first} s for the first step and its compiling"
    )


def _count(number: float | None) -> str:
    assert number is not None
    return f"{number:,.0f}"


def _part_cells(row: TrainingRow) -> list[str]:
    assert row.measured is not None
    assert row.measured.breakdown is not None
    found = row.measured.breakdown
    shares = [f"{_ms(found.parts[part])} ({100 * found.parts[part] / found.step:.0f} %)" for part in PARTS]
    return [row.name, _ms(found.step), *shares]


def _phase_cells(row: TrainingRow) -> list[list[str]]:
    assert row.measured is not None
    assert row.measured.breakdown is not None
    found = row.measured.breakdown.phases
    return [[row.name, phase, *(_ms(found[part][phase]) for part in MODEL)] for phase in PHASES]


def _ms(seconds: float) -> str:
    return format_number(1e3 * seconds)


def _lines_below(profiled: Sequence[TrainingRow]) -> list[str]:
    """Return lines about overlapped communication, the longest idle time and the host's waits for the GPU."""
    lines = []
    for row in profiled:
        assert row.measured is not None
        assert row.measured.breakdown is not None
        found = row.measured.breakdown
        if found.communication:
            hidden = found.communication - found.parts[COMMUNICATION]
            lines.append(f"* {row.name}: communication {_ms(found.communication)} ms, of which {_ms(hidden)} hidden")
        if found.longest_idle is not None:
            rank = [one.longest_idle for one in row.measured.breakdown_by_rank].index(found.longest_idle)
            longest, host = _ms(found.longest_idle.seconds), found.longest_idle.host
            lines.append(f"* {row.name}: idle for {longest} ms at once on rank {rank}, the host at {host}")
        lines += [f"* {row.name}: {count:g} x {place}" for place, count in (found.host_syncs or {}).items()]
    return ["", *lines] if lines else []
