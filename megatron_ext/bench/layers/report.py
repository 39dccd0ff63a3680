"""Report of `selectron bench layers` as JSON and as a Markdown table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kernels.bench.bench_report import BenchRow, ContestReport
from kernels.bench.timing import Times
from kernels.common.dispatch import Choice
from megatron_ext.bench.layers.cases import FLA, OURS, LayerPlan, LayerShape
from megatron_ext.bench.layers.ours import CHECKED_LENGTH, MAX_ERROR, Agreement
from megatron_ext.utils.markdown import format_number, replace_nonfinite, table

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
    """Measurements of forward and backward pass.

    Attributes:
        times: milliseconds.
        memory: peak bytes beyond weights and hidden states, including gradients.
        parameters: number of weights of the layer.
    """

    times: Times
    memory: int
    parameters: int


@dataclass(frozen=True, kw_only=True)
class LayerRow(BenchRow[Measured]):
    """Result of one layer at one shape.

    Attributes:
        mixer: name of the mixer.
        shape: of the problem.
        maker: implementer of the layer, ours or a peer.
        agreement: of our layer with its plain torch forms.
        choices: implementation that each op of our layer chose, and why.
        flops: FLOPs per token, by the mixer's own formula.
        note: remark that readers of the numbers need.
    """

    mixer: str
    shape: LayerShape
    maker: str
    agreement: Agreement | None = None
    choices: tuple[tuple[str, Choice], ...] = ()
    flops: float | None = None
    note: str | None = None

    @property
    def title(self) -> str:
        """Identification of the row."""
        return f"{self.shape.size_name} {self.shape.length_name} {self.mixer} {self.maker}"


@dataclass(frozen=True, kw_only=True)
class LayerReport(ContestReport[LayerRow]):
    """Results of a whole benchmark run.

    Attributes:
        plan: settings.
        peak_flops: basis of MFU in FLOP/s; None: unknown.
    """

    stem = "layers"

    plan: LayerPlan
    peak_flops: float | None

    def peer_ratio(self, row: LayerRow) -> float | None:
        """Return fla's time divided by ours at the same shape; None: the row is fla's, or one was not measured."""
        if row.maker != OURS or row.measured is None:
            return None
        for other in self.rows:
            if (other.maker, other.mixer, other.shape) == (FLA, row.mixer, row.shape) and other.measured is not None:
                return other.measured.times.median / row.measured.times.median
        return None

    def numbers(self) -> dict[str, Any]:
        """Return settings and rows."""
        plan = asdict(self.plan)
        del plan["shapes"]
        return {
            "peak_tflops": None if self.peak_flops is None else self.peak_flops / 1e12,
            "settings": plan | {"output": str(self.plan.output), "dtype": "bfloat16"},
            "rows": [_row_dict(self, row) for row in self.rows],
        }

    def body(self) -> list[str]:
        """Return the table and the reasons for the implementations."""
        peak = "unknown" if self.peak_flops is None else f"{format_number(self.peak_flops / 1e12)} TFLOP/s"
        return [
            "One layer's mixer with its projections: forward and backward pass in bf16, with gradients of all weights. "
            f"MFU counts 6 FLOPs per weight and token and 3 times the mixer's own forward pass; peak {peak}. Memory is "
            "in addition to weights and hidden states. "
            f"Seed {self.plan.seed}. Medians of {self.plan.repeat} runs with a cold L2 cache. The relative error of "
            f"our mixers against plain torch is at most {MAX_ERROR:.0e} at up to {CHECKED_LENGTH} tokens.",
            "",
            *table(COLUMNS, [_cells(self, row) for row in self.rows]),
            *_choice_lines(self),
        ]


def _row_dict(report: LayerReport, row: LayerRow) -> dict[str, Any]:
    shape = row.shape
    fields: dict[str, Any] = {
        "mixer": row.mixer,
        "layer": row.maker,
        "size": shape.size_name,
        **shape.size._asdict(),
        "length": shape.length,
        "batch": shape.batch,
        "implementations": [{"op": op, **choice._asdict()} for op, choice in row.choices],
    }
    fields |= {name: text for name in ("failed", "not_run", "note") if (text := getattr(row, name)) is not None}
    if row.agreement is not None:
        fields["check"] = replace_nonfinite(asdict(row.agreement))
    return fields if row.measured is None else fields | _numbers(report, row, row.measured)


def _numbers(report: LayerReport, row: LayerRow, measured: Measured) -> dict[str, Any]:
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


def _cells(report: LayerReport, row: LayerRow) -> list[str]:
    implementation = ", ".join(choice.name for _, choice in row.choices)
    names = [row.shape.size_name, row.shape.length_name, row.mixer, row.maker, implementation]
    if row.measured is None:
        return [*names, row.summary, *[""] * (len(COLUMNS) - len(names) - 1)]
    numbers = _numbers(report, row, row.measured)
    mfu, ratio = numbers["mfu"], numbers["fla_time_over_ours"]
    return [
        *names,
        format_number(numbers["ms"]),
        f"{format_number(numbers['ms_20'])} to {format_number(numbers['ms_80'])}",
        format_number(numbers["tokens_per_s"]),
        "" if mfu is None else f"{100 * mfu:.1f} %",
        format_number(numbers["memory_bytes"] / 2**30),
        "" if ratio is None else f"{format_number(ratio)}x",
    ]


def _choice_lines(report: LayerReport) -> list[str]:
    """Return a line for each implementation that an op chose, and for each note."""
    lines = [
        f"* {row.mixer}: {op}: {choice.name} ({choice.reason})" for row in report.rows for op, choice in row.choices
    ]
    lines += [f"* {row.mixer}, {row.maker}: {row.note}" for row in report.rows if row.note is not None]
    return ["", *dict.fromkeys(lines)] if lines else []
