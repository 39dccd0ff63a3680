"""What was measured of preparing data, as JSON and as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.bench.report import machine_line
from megatron_ext.reports import table, write_both


@dataclass(frozen=True)
class Row:
    """One contestant: medians over the rounds.

    Attributes:
        name: which.
        documents: that it read.
        bytes: of text in them, as UTF-8.
        tokens: that it made.
        seconds: from its start to its end; of a bare tokenizer: of encoding alone.
        cpu_seconds: of all its processes; of a bare tokenizer: of encoding alone.
        start_cpu_seconds: the same for a document a file: what does not grow with the input.
        peak_bytes: resident memory of its largest process, the most of all rounds; 0: not measured.
        does_more: what it does that the others do not.
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


@dataclass(frozen=True)
class Report:
    """All of a run.

    Attributes:
        data: what was read.
        machine: where.
        workers: processes of each.
        rounds: how often each ran.
        rows: the bare tokenizer's first.
        left_out: contestants that were not there.
    """

    data: str
    machine: dict[str, str | None]
    workers: int
    rounds: int
    rows: Sequence[Row]
    left_out: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """All numbers, with units in their names."""
        return asdict(self)

    def markdown(self) -> str:
        """The table, with the machine above it."""
        floors = self.rows[:2]
        shares = [f"of {floor.name}" for floor in floors]
        speeds = ("MB a processor second", "thousand tokens a processor second")
        head = ("contestant", "tokens", "s", "processor s", "of them to start", *speeds, *shares, "peak MiB")
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
            f"{self.workers} workers of one thread; medians of {self.rounds} rounds in turn. The last columns but one "
            "are of processor seconds without those that a document a file takes: other work on the machine and "
            "starting are not in them."
        )
        notes = [f"{row.name}: {row.does_more}." for row in self.rows if row.does_more]
        notes += [f"Left out: {name}." for name in self.left_out]
        return "\n".join([machine_line(self.machine), "", about, *notes, "", *table(head, rows)]) + "\n"

    def write(self, folder: Path) -> None:
        """Write prepare.json and prepare.md, each whole or not at all."""
        write_both(folder, "prepare", self.to_dict(), self.markdown())
