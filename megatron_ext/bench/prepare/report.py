"""Report of `selectron bench prepare` as JSON and as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kernels.bench.bench_report import BenchReport
from megatron_ext.utils.markdown import table


@dataclass(frozen=True)
class PrepareRow:
    """Result of one contestant: medians over the rounds.

    Attributes:
        name: name of the contestant.
        documents: number of documents read.
        bytes: size of the documents' text in UTF-8 bytes.
        tokens: number of tokens produced.
        seconds: seconds from start to exit; for a bare tokenizer, seconds of encoding alone.
        cpu_seconds: processor seconds of all processes; for a bare tokenizer, those of encoding alone.
        start_cpu_seconds: `cpu_seconds` for one document per file, which does not depend on the input size.
        peak_bytes: resident memory of the largest process, maximum over the rounds; 0: not measured.
        does_more: additional work that the other contestants do not do.
    """

    name: str
    documents: int
    bytes: int
    tokens: int
    seconds: float
    cpu_seconds: float
    start_cpu_seconds: float
    peak_bytes: int
    does_more: str = ""

    @property
    def work(self) -> float:
        """Processor seconds that grow with the input."""
        return self.cpu_seconds - self.start_cpu_seconds


@dataclass(frozen=True, kw_only=True)
class PrepareReport(BenchReport):
    """Results of a whole benchmark run.

    Attributes:
        data: description of the input.
        workers: number of processes of each contestant.
        rounds: number of rounds.
        rows: results of the contestants, those of the bare tokenizer first.
        left_out: contestants that were not available.
    """

    stem = "prepare"

    data: str
    workers: int
    rounds: int
    rows: Sequence[PrepareRow]
    left_out: Sequence[str] = ()

    def numbers(self) -> dict[str, Any]:
        """Return all numbers, with units in their names."""
        return asdict(self)

    def body(self) -> list[str]:
        """Return a description of the input, notes and the table, as Markdown lines."""
        floors = self.rows[:2]
        shares = [f"of {floor.name}" for floor in floors]
        speeds = ("MB per CPU second", "thousand tokens per CPU second")
        head = ("contestant", "tokens", "s", "CPU s", "CPU s to start", *speeds, *shares, "peak MiB")
        rows = [
            (
                row.name,
                f"{row.tokens:,}",
                f"{row.seconds:.1f}",
                f"{row.cpu_seconds:.1f}",
                f"{row.start_cpu_seconds:.1f}",
                f"{row.bytes / row.work / 1e6:.2f}",
                f"{row.tokens / row.work / 1e3:.0f}",
                *(f"{100 * floor.work / row.work:.0f} %" for floor in floors),
                f"{row.peak_bytes >> 20}" if row.peak_bytes else "-",
            )
            for row in self.rows
        ]
        about = (
            f"{self.data}: {floors[0].documents:,} documents, {floors[0].bytes / 1e6:.1f} MB of text. "
            f"{self.workers} workers of one thread; medians of {self.rounds} rounds. Speeds and percentages use CPU "
            "seconds, so that other load on the machine hardly affects them, minus the CPU seconds to start, measured "
            "with one document per file."
        )
        notes = [f"{row.name}: {row.does_more}." for row in self.rows if row.does_more]
        notes += [f"Not measured: {name}." for name in self.left_out]
        return [about, *notes, "", *table(head, rows)]
