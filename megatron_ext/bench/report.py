"""What was measured, as JSON and as a Markdown table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.bench.report import machine_line
from kernels.bench.timing import Times
from kernels.dispatch import Choice
from megatron_ext.bench.cases import FLA, OURS, LayerShape, Plan
from megatron_ext.bench.ours import CHECKED_LENGTH, LIMIT, Agreement
from megatron_ext.reports import digits, finite, table, write_both

COLUMNS = (
    "size",
    "length x batch",
    "mixer",
    "layer",
    "implementation",
    "ms",
    "20 % to 80 %",
    "tokens/s",
    "MFU",
    "memory, GiB",
    "fla's time over ours",
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Numbers of forward and backward.

    Attributes:
        times: milliseconds.
        memory: most bytes held at once beyond weights and hidden states, gradients included.
        parameters: weights of the layer.
    """

    times: Times
    memory: int
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layer at one shape: measured, failed or not run.

    Attributes:
        mixer: its name.
        shape: the problem.
        maker: whose layer.
        measured: numbers, if the result was right.
        failed: what was wrong with ours.
        not_run: why a peer could not run.
        agreement: of ours with its plain forms.
        choices: which implementation each op of ours took, and why.
        flops: operations a token, by the mixer's own formula.
        note: what a reader of its numbers must know.
    """

    mixer: str
    shape: LayerShape
    maker: str
    measured: Measured | None = None
    failed: str | None = None
    not_run: str | None = None
    agreement: Agreement | None = None
    choices: tuple[tuple[str, Choice], ...] = ()
    flops: float | None = None
    note: str | None = None

    @property
    def title(self) -> str:
        """What it is a row of."""
        return f"{self.shape.size_name} {self.shape.length_name} {self.mixer} {self.maker}"

    @property
    def summary(self) -> str:
        """Its result in a few words."""
        if self.measured is not None:
            return f"{digits(self.measured.times.median)} ms"
        return f"failed: {self.failed}" if self.failed is not None else f"not run: {self.not_run}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """All of a run.

    Attributes:
        plan: what was asked for.
        machine: where it ran, see `describe_machine`.
        peak_flops: what utilisation (MFU) is a fraction of; None: not known.
        rows: in the order of the table.
    """

    plan: Plan
    machine: dict[str, str | None]
    peak_flops: float | None
    rows: list[Row]

    @property
    def failures(self) -> list[Row]:
        """Rows of ours that were wrong or did not run."""
        return [row for row in self.rows if row.failed is not None]

    def peer_ratio(self, row: Row) -> float | None:
        """How many times longer than ours fla took at the same shape; None: a row of fla's, or one was not timed."""
        if row.maker != OURS or row.measured is None:
            return None
        for other in self.rows:
            if (other.maker, other.mixer, other.shape) == (FLA, row.mixer, row.shape) and other.measured is not None:
                return other.measured.times.median / row.measured.times.median
        return None


def to_dict(report: Report) -> dict[str, Any]:
    """All numbers, with units in their names."""
    plan = asdict(report.plan)
    del plan["shapes"]
    return {
        "machine": report.machine,
        "peak_tflops": None if report.peak_flops is None else report.peak_flops / 1e12,
        "settings": plan | {"output": str(report.plan.output), "dtype": "bfloat16"},
        "rows": [_row_dict(report, row) for row in report.rows],
    }


def _row_dict(report: Report, row: Row) -> dict[str, Any]:
    shape = row.shape
    found: dict[str, Any] = {
        "mixer": row.mixer,
        "layer": row.maker,
        "size": shape.size_name,
        **shape.size._asdict(),
        "length": shape.length,
        "batch": shape.batch,
        "implementations": [{"op": op, **choice._asdict()} for op, choice in row.choices],
    }
    found |= {name: said for name in ("failed", "not_run", "note") if (said := getattr(row, name)) is not None}
    if row.agreement is not None:
        found["check"] = finite(asdict(row.agreement))
    return found if row.measured is None else found | _numbers(report, row, row.measured)


def _numbers(report: Report, row: Row, measured: Measured) -> dict[str, Any]:
    tokens_per_s = row.shape.tokens / (measured.times.median * 1e-3)
    flops, peak = row.flops, report.peak_flops
    return {
        "ms": measured.times.median,
        "ms_20": measured.times.q20,
        "ms_80": measured.times.q80,
        "tokens_per_s": tokens_per_s,
        "flops_per_token": flops,
        "mfu": None if flops is None or peak is None else flops * tokens_per_s / peak,
        "memory_bytes": measured.memory,
        "parameters": measured.parameters,
        "fla_time_over_ours": report.peer_ratio(row),
    }


def markdown(report: Report) -> str:
    """The table, with the machine above it and the reasons of the implementations below."""
    peak = "not known" if report.peak_flops is None else f"{digits(report.peak_flops / 1e12)} TFLOP/s"
    lines = [
        machine_line(report.machine),
        "",
        "One layer's mixer with its projections, forward + backward with the gradients of all weights, in bf16. MFU "
        f"counts 6 operations a weight and token and 3 times the mixer's own forward; peak {peak}. Memory is beyond "
        f"weights and hidden states. Seed {report.plan.seed}. Medians of {report.plan.repeat} runs with a cold L2 "
        f"cache. Ours agree with their plain torch forms within {LIMIT:.0e} at {CHECKED_LENGTH} tokens or fewer.",
        "",
        *table(COLUMNS, [_cells(report, row) for row in report.rows]),
    ]
    return "\n".join([*lines, *_choice_lines(report)]) + "\n"


def _cells(report: Report, row: Row) -> list[str]:
    implementation = ", ".join(choice.name for _, choice in row.choices)
    names = [row.shape.size_name, row.shape.length_name, row.mixer, row.maker, implementation]
    if row.measured is None:
        return [*names, row.summary, *[""] * (len(COLUMNS) - len(names) - 1)]
    numbers = _numbers(report, row, row.measured)
    mfu, ratio = numbers["mfu"], numbers["fla_time_over_ours"]
    return [
        *names,
        digits(numbers["ms"]),
        f"{digits(numbers['ms_20'])} to {digits(numbers['ms_80'])}",
        digits(numbers["tokens_per_s"]),
        "" if mfu is None else f"{100 * mfu:.1f} %",
        digits(numbers["memory_bytes"] / 2**30),
        "" if ratio is None else f"{digits(ratio)}x",
    ]


def _choice_lines(report: Report) -> list[str]:
    """One line for each implementation that a mixer's op took, and why, and for what else must be known."""
    lines = [
        f"* {row.mixer}: {op}: {choice.name} ({choice.reason})" for row in report.rows for op, choice in row.choices
    ]
    lines += [f"* {row.mixer}, {row.maker}: {row.note}" for row in report.rows if row.note is not None]
    return ["", *dict.fromkeys(lines)] if lines else []


def write(report: Report, folder: Path) -> None:
    """Write layers.json and layers.md, each whole or not at all."""
    write_both(folder, "layers", to_dict(report), markdown(report))
