"""Report of the benchmark, as JSON and as a Markdown table."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kernels.bench.cases import BASELINE, KernelPlan, Pass, Shape
from kernels.bench.checks import Verdict
from kernels.bench.timing import Ceilings, Times
from megatron_ext.utils import git_info
from megatron_ext.utils.markdown import digits, finite, table, write_both

COLUMNS = (
    "heads x dim",
    "length x batch",
    "op",
    "pass",
    "ms",
    "20 % to 80 %",
    "TFLOP/s",
    "GB/s",
    "floor, ms",
    "of the floor",
    "extra memory",
    f"speed over {BASELINE}",
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one pass.

    Attributes:
        times: milliseconds.
        operations: floating-point operations that the pass requires.
        bytes: memory traffic that the pass requires.
        extra_memory: peak memory beyond q, k, v, o and their gradients, as a fraction of those.
    """

    times: Times
    operations: float
    bytes: float
    extra_memory: float

    def floor(self, ceilings: Ceilings) -> float:
        """Return the lower bound of the time, milliseconds: the operations or the bytes at the GPU's measured peak."""
        return 1e3 * max(self.operations / ceilings.operations, self.bytes / ceilings.bytes)


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One contestant, shape and pass: measured, failed or not run.

    Attributes:
        name: name of the contestant.
        shape: the problem.
        which: the pass.
        measured: measurements, if the result was correct.
        failed: description and size of the error.
        not_run: reason why it could not run.
        verdict: result of the check.
    """

    name: str
    shape: Shape
    which: Pass
    measured: Measured | None = None
    failed: str | None = None
    not_run: str | None = None
    verdict: Verdict | None = None

    @property
    def summary(self) -> str:
        """Return the result in a few words."""
        if self.measured is not None:
            return f"{digits(self.measured.times.median)} ms"
        return f"failed: {self.failed}" if self.failed is not None else f"not run: {self.not_run}"


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """Report of a run.

    Attributes:
        plan: settings of the run.
        machine: description of the machine, see `describe_machine`.
        ceilings: measured peaks of the GPU.
        rows: results, in the order of the table.
    """

    plan: KernelPlan
    machine: dict[str, str | None]
    ceilings: Ceilings
    rows: list[KernelRow]

    @property
    def failures(self) -> list[KernelRow]:
        """Return the rows with wrong results."""
        return [row for row in self.rows if row.failed is not None]

    def speed(self, row: KernelRow) -> float | None:
        """Return a row's speed relative to the baseline at the same shape and pass; None if one was not timed."""
        for other in self.rows:
            if (other.name, other.shape, other.which) == (BASELINE, row.shape, row.which):
                if other.measured is None or row.measured is None:
                    return None
                return other.measured.times.median / row.measured.times.median
        return None


def describe_machine(device: torch.device) -> dict[str, str | None]:
    """Return GPU, driver, versions, commit and date; None for what is unknown."""
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "driver": git_info.output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "fla": version("flash-linear-attention"),
        "python": platform.python_version(),
        "commit": git_info.commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine_line(machine: Mapping[str, str | None]) -> str:
    """Return the description of a machine as a sentence."""
    return "Machine: " + ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None) + "."


def version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def to_dict(report: KernelReport) -> dict[str, Any]:
    """Return all numbers, with units in their names."""
    plan = asdict(report.plan)
    del plan["shapes"]
    return {
        "machine": report.machine,
        "ceilings": {"tflops": report.ceilings.operations / 1e12, "gb_per_s": report.ceilings.bytes / 1e9},
        "settings": plan | {"output": str(report.plan.output), "dtype": "bfloat16"},
        "rows": [_row_dict(report, row) for row in report.rows],
    }


def _row_dict(report: KernelReport, row: KernelRow) -> dict[str, Any]:
    found: dict[str, Any] = {"op": row.name, **asdict(row.shape), "pass": row.which}
    if row.failed is not None:
        found["failed"] = row.failed
    if row.not_run is not None:
        found["not_run"] = row.not_run
    if row.measured is not None:
        measured, seconds = row.measured, row.measured.times.median * 1e-3
        floor = measured.floor(report.ceilings)
        found |= {
            "ms": measured.times.median,
            "ms_20": measured.times.q20,
            "ms_80": measured.times.q80,
            "operations": measured.operations,
            "bytes": measured.bytes,
            "tflops": measured.operations / seconds / 1e12,
            "gb_per_s": measured.bytes / seconds / 1e9,
            "floor_ms": floor,
            "of_floor": floor / measured.times.median,
            "extra_memory_percent": 100 * measured.extra_memory,
            f"speed_over_{BASELINE}": report.speed(row),
        }
    return found if row.verdict is None else found | {"check": finite(asdict(row.verdict))}


def markdown(report: KernelReport) -> str:
    """Return the table, with the machine above it and the choices below."""
    plan, ceilings = report.plan, report.ceilings
    lines = [
        machine_line(report.machine),
        "",
        f"Measured ceilings: bf16 product of 8192 x 8192 matrices {ceilings.operations / 1e12:.0f} TFLOP/s, copy "
        f"{ceilings.bytes / 1e12:.2f} TB/s (read + written). Inputs: bf16, choices {plan.choices}, chunk "
        f"{plan.chunk_size}, top_k {plan.top_k}, seed {plan.seed}. Medians of {plan.repeat} runs with a cold L2 cache.",
        "",
        "TFLOP/s and GB/s count what the op must do and move, whatever the kernel does.",
        "",
        *table(COLUMNS, [_cells(report, row) for row in report.rows]),
    ]
    return "\n".join([*lines, *_choice_lines(report)]) + "\n"


def _cells(report: KernelReport, row: KernelRow) -> list[str]:
    names = [row.shape.heads_name, row.shape.length_name, row.name, row.which.replace("_", " + ")]
    if row.measured is None:
        return [*names, row.summary, *[""] * (len(COLUMNS) - len(names) - 1)]
    numbers = _row_dict(report, row)
    speed = report.speed(row)
    return [
        *names,
        digits(numbers["ms"]),
        f"{digits(numbers['ms_20'])} to {digits(numbers['ms_80'])}",
        digits(numbers["tflops"]),
        digits(numbers["gb_per_s"]),
        digits(numbers["floor_ms"]),
        f"{100 * numbers['of_floor']:.0f} %",
        f"{numbers['extra_memory_percent']:.1f} %",
        "" if speed is None else f"{digits(speed)}x",
    ]


def _choice_lines(report: KernelReport) -> list[str]:
    """Return one line for each check of choices, which the passes of a contestant share."""
    lines = {}
    for row in report.rows:
        if row.verdict is None or not row.verdict.choices:
            continue
        share = row.verdict.largest_share
        told = "" if share is None else f"; a head's most popular chunk has at most {100 * share:.1f} % of its queries"
        lines[row.name, row.shape] = (
            f"* {row.name}, {row.shape.heads_name}, {row.shape.length_name}: {row.verdict.different} of "
            f"{row.verdict.choices} choices differ from those by float64{told}"
        )
    return ["", *lines.values()] if lines else []


def write(report: KernelReport, folder: Path) -> None:
    """Write kernels.json and kernels.md, each atomically."""
    write_both(folder, "kernels", to_dict(report), markdown(report))
