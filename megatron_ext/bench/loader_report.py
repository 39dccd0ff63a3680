"""What was measured of loading data, as JSON and as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.bench.report import machine_line
from megatron_ext.reports import table, write_both


@dataclass(frozen=True)
class Row:
    """Batches read.

    Attributes:
        shards: of the training text.
        length: tokens a sample.
        batch: samples a micro-batch.
        ranks: processes that read at once.
        cold: the files were not in the operating system's memory.
        tokens_per_second: of all of them.
        tokens_per_processor_second: of each, while a processor worked for it: other work on the machine is not in it.
        later: the same in as long again, when hardly a shard is opened for the first time.
        floor: tokens a second at which one core copies the bytes of such batches.
        bare: tokens a processor second of reads alone, at random places of files held open; None where it is cold.
    """

    shards: int
    length: int
    batch: int
    ranks: int
    cold: bool
    tokens_per_second: float
    tokens_per_processor_second: float
    later: float
    floor: float
    bare: float | None


@dataclass(frozen=True)
class Resume:
    """A run that goes on.

    Attributes:
        shards: of the training text.
        length: tokens a sample.
        sample: the first that it reads.
        seconds: to have it: manifest read, shards opened, one sample as a batch.
        seconds_checked: the same, and all shards checked as `data.verify: sha256` does where they were before.
    """

    shards: int
    length: int
    sample: int
    seconds: float
    seconds_checked: float


@dataclass(frozen=True)
class Report:
    """All of a run.

    Attributes:
        data: what was read.
        machine: where.
        seconds: that each row was read for.
        rows: speeds.
        resumes: times to a first batch.
    """

    data: str
    machine: dict[str, str | None]
    seconds: float
    rows: Sequence[Row]
    resumes: Sequence[Resume]

    def to_dict(self) -> dict[str, Any]:
        """All numbers, with units in their names."""
        return asdict(self)

    def markdown(self) -> str:
        """The tables, with the machine above them."""
        speeds = ("million tokens/s", "million tokens a processor second", "then", "of the floor")
        head = ("shards", "tokens a sample", "samples a batch", "ranks", "files", *speeds)
        rows = [
            (
                f"{row.shards:,}",
                f"{row.length:,}",
                f"{row.batch}",
                f"{row.ranks}",
                "on the disk" if row.cold else "in memory",
                f"{row.tokens_per_second / 1e6:.1f}",
                f"{row.tokens_per_processor_second / 1e6:.1f}",
                f"{row.later / 1e6:.1f}",
                f"{100 * row.tokens_per_processor_second / row.floor:.0f} %",
            )
            for row in self.rows
        ]
        resumes = [
            (
                f"{one.shards:,}",
                f"{one.length:,}",
                f"{one.sample:,}",
                f"{1e3 * one.seconds:.0f}",
                f"{1e3 * one.seconds_checked:.0f}",
            )
            for one in self.resumes
        ]
        about = (
            f"{self.data}. Each row was read for {self.seconds:g} s, then for as long again. Floor: the 30 bytes that "
            "a token is stored and given in, copied from memory to memory by one core, measured beside each row."
        )
        lines = [
            machine_line(self.machine),
            "",
            about,
            "",
            *table(head, rows),
            "",
            *self._flatness(),
            *table(("shards", "tokens a sample", "first sample", "ms to it", "ms, data.verify sha256"), resumes),
        ]
        return "\n".join(lines) + "\n"

    def _flatness(self) -> list[str]:
        """A table of what a token takes with more shards, files in memory; nothing for one number of them."""
        warm = [row for row in self.rows if not row.cold]
        fewest = {(row.length, row.ranks): row for row in sorted(warm, key=lambda row: -row.shards)}
        pairs = [(row, fewest[row.length, row.ranks]) for row in warm]
        rows = [_compared(row, least) for row, least in pairs if row.shards > least.shards]
        if not rows:
            return []
        about = "Processor time of a token with more shards beside that with the fewest, files in memory:"
        ratios = ("ratio", "then", "of reads alone", "microseconds more a sample, then", "of reads alone")
        return [about, "", *table(("shards", "tokens a sample", "ranks", *ratios), rows), ""]

    def write(self, folder: Path) -> None:
        """Write loader.json and loader.md, each whole or not at all."""
        write_both(folder, "loader", self.to_dict(), self.markdown())


def _compared(row: Row, least: Row) -> tuple[str, ...]:
    """A line of that table."""
    ratio = least.tokens_per_processor_second / row.tokens_per_processor_second
    cells = [f"{row.shards:,} / {least.shards:,}", f"{row.length:,}", f"{row.ranks}", f"{ratio:.2f}"]
    speeds = [(row.later, least.later), (row.bare or math.nan, least.bare or math.nan)]
    cells += [f"{few / many:.2f}" for many, few in speeds]
    cells += [f"{1e6 * row.length * (1 / many - 1 / few):.1f}" for many, few in speeds]
    return tuple(cells)
