"""Report of the kernels' benchmark, as JSON and as a Markdown table."""

from dataclasses import asdict, dataclass
from typing import Any

from kernels.bench.bench_report import BenchRow, ContestReport
from kernels.bench.cases import BASELINE, KernelPlan, Pass, Shape
from kernels.bench.checks import Verdict
from kernels.bench.timing import Ceilings, Times
from megatron_ext.utils.markdown import format_number, replace_nonfinite, table

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
class KernelRow(BenchRow[Measured]):
    """Result of one contestant, shape and pass.

    Attributes:
        name: name of the contestant.
        shape: the problem.
        pass_name: the pass.
        verdict: result of the check.
    """

    name: str
    shape: Shape
    pass_name: Pass
    verdict: Verdict | None = None


@dataclass(frozen=True, kw_only=True)
class KernelReport(ContestReport[KernelRow]):
    """Report of a run.

    Attributes:
        plan: settings of the run.
        ceilings: measured peaks of the GPU.
    """

    stem = "kernels"

    plan: KernelPlan
    ceilings: Ceilings

    def speed(self, row: KernelRow) -> float | None:
        """Return a row's speed relative to the baseline at the same shape and pass; None if one was not timed."""
        for other in self.rows:
            if (other.name, other.shape, other.pass_name) == (BASELINE, row.shape, row.pass_name):
                if other.measured is None or row.measured is None:
                    return None
                return other.measured.times.median / row.measured.times.median
        return None

    def numbers(self) -> dict[str, Any]:
        """Return settings, ceilings and rows."""
        plan = asdict(self.plan)
        del plan["shapes"]
        return {
            "ceilings": {"tflops": self.ceilings.operations / 1e12, "gb_per_s": self.ceilings.bytes / 1e9},
            "settings": plan | {"output": str(self.plan.output), "dtype": "bfloat16"},
            "rows": [_row_dict(self, row) for row in self.rows],
        }

    def body(self) -> list[str]:
        """Return the ceilings, the table and the choices."""
        plan, ceilings = self.plan, self.ceilings
        return [
            f"Measured ceilings: bf16 product of 8192 x 8192 matrices {ceilings.operations / 1e12:.0f} TFLOP/s, copy "
            f"{ceilings.bytes / 1e12:.2f} TB/s (read + written). Inputs: bf16, choices {plan.choices}, chunk "
            f"{plan.chunk_size}, top_k {plan.top_k}, seed {plan.seed}. Medians of {plan.repeat} runs with a cold L2 "
            "cache.",
            "",
            "TFLOP/s and GB/s count what the op must do and move, whatever the kernel does.",
            "",
            *table(COLUMNS, [_cells(self, row) for row in self.rows]),
            *_choice_lines(self),
        ]


def _row_dict(report: KernelReport, row: KernelRow) -> dict[str, Any]:
    fields: dict[str, Any] = {"op": row.name, **asdict(row.shape), "pass": row.pass_name}
    if row.failed is not None:
        fields["failed"] = row.failed
    if row.not_run is not None:
        fields["not_run"] = row.not_run
    if row.measured is not None:
        measured, seconds = row.measured, row.measured.times.median * 1e-3
        floor = measured.floor(report.ceilings)
        fields |= {
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
    return fields if row.verdict is None else fields | {"check": replace_nonfinite(asdict(row.verdict))}


def _cells(report: KernelReport, row: KernelRow) -> list[str]:
    cells = [row.shape.heads_name, row.shape.length_name, row.name, row.pass_name.replace("_", " + ")]
    if row.measured is None:
        return [*cells, row.summary, *[""] * (len(COLUMNS) - len(cells) - 1)]
    fields = _row_dict(report, row)
    speed = report.speed(row)
    return [
        *cells,
        format_number(fields["ms"]),
        f"{format_number(fields['ms_20'])} to {format_number(fields['ms_80'])}",
        format_number(fields["tflops"]),
        format_number(fields["gb_per_s"]),
        format_number(fields["floor_ms"]),
        f"{100 * fields['of_floor']:.0f} %",
        f"{fields['extra_memory_percent']:.1f} %",
        "" if speed is None else f"{format_number(speed)}x",
    ]


def _choice_lines(report: KernelReport) -> list[str]:
    """Return one line for each check of choices, which the passes of a contestant share."""
    lines = {}
    for row in report.rows:
        if row.verdict is None or not row.verdict.choices:
            continue
        share = row.verdict.largest_share
        share_text = (
            "" if share is None else f"; a head's most popular chunk has at most {100 * share:.1f} % of its queries"
        )
        lines[row.name, row.shape] = (
            f"* {row.name}, {row.shape.heads_name}, {row.shape.length_name}: {row.verdict.different} of "
            f"{row.verdict.choices} choices differ from those by float64{share_text}"
        )
    return ["", *lines.values()] if lines else []
