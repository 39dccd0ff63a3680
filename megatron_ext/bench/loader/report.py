"""Report of `selectron bench loader` as JSON and as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from kernels.bench.bench_report import BenchReport
from megatron_ext.utils.markdown import table


@dataclass(frozen=True)
class LoaderRow:
    """Throughput of reading batches.

    Attributes:
        shards: number of shards of the training text.
        length: tokens per sample.
        batch: samples per micro-batch.
        ranks: number of processes that read concurrently.
        cold: True if the files were not in the page cache.
        tokens_per_second: throughput of all processes together.
        tokens_per_processor_second: mean throughput of a process per second of processor time, which is hardly affected
            by other load on the machine.
        floor: tokens per second at which one core copies the bytes of such batches.
    """

    shards: int
    length: int
    batch: int
    ranks: int
    cold: bool
    tokens_per_second: float
    tokens_per_processor_second: float
    floor: float


@dataclass(frozen=True)
class Turns:
    """Reading times of a folder, measured in alternation with other folders, with cached files and open shards.

    Attributes:
        shards: number of shards of the training text.
        length: tokens per sample.
        ranks: number of processes that read concurrently.
        sample_seconds: processor seconds per sample, for each round of each rank. The same round has the same index in
            all folders.
        bare_seconds: processor seconds per raw read, for each round of each rank. A raw read copies as many bytes of a
            tar as a sample spans, at a random position, into one buffer. If it slows down with more shards, the cause
            is the machine's memory.
    """

    shards: int
    length: int
    ranks: int
    sample_seconds: Sequence[float]
    bare_seconds: Sequence[float]


@dataclass(frozen=True)
class Resume:
    """Time to the first sample of a resumed run.

    Attributes:
        shards: number of shards of the training text.
        length: tokens per sample.
        sample: index of the first sample.
        seconds: seconds to read the manifest, open the shards and return one sample as a batch.
        seconds_checked: `seconds` plus the seconds of the check by `data.verify: sha256` of shards that an earlier
            start verified.
    """

    shards: int
    length: int
    sample: int
    seconds: float
    seconds_checked: float


@dataclass(frozen=True, kw_only=True)
class LoaderReport(BenchReport):
    """Results of a whole benchmark run.

    Attributes:
        data: description of the data.
        seconds: duration of reading for each row, and for each folder measured in alternation.
        rows: throughput measurements.
        turns: times per sample by number of shards; empty for a single number of shards.
        resumes: times to the first sample of a resumed run.
    """

    stem = "loader"

    data: str
    seconds: float
    rows: Sequence[LoaderRow]
    turns: Sequence[Turns]
    resumes: Sequence[Resume]

    def numbers(self) -> dict[str, Any]:
        """Return all numbers, with units in their names."""
        return asdict(self)

    def body(self) -> list[str]:
        """Return a description of the data, and the tables, as Markdown lines."""
        speeds = ("million tokens/s", "million tokens a processor second", "of the floor")
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
            f"{self.data}. Each row was read for {self.seconds:g} s. Floor: the 30 bytes that "
            "a token is stored and given in, copied from memory to memory by one core, measured beside each row."
        )
        return [
            about,
            "",
            *table(head, rows),
            "",
            *self._flatness(),
            *table(("shards", "tokens a sample", "first sample", "ms to it", "ms, data.verify sha256"), resumes),
        ]

    def _flatness(self) -> list[str]:
        """Return a table of the time per sample by number of shards; empty for a single number of shards."""
        if not self.turns:
            return []
        about = (
            "Microseconds of a processor a sample, files in memory and shards opened before. In each process the "
            f"folders took turns, {self.seconds:g} s of samples each: medians of all rounds, with the least and the "
            "most; a ratio is to the fewest shards in the same round. Reads alone: as many bytes as a sample spans, at "
            "random places, into one buffer."
        )
        head = ("shards", "tokens a sample", "ranks", "microseconds", "ratio", "reads alone", "ratio of reads alone")
        fewest = {(one.length, one.ranks): one for one in sorted(self.turns, key=lambda one: -one.shards)}
        rows = [_compared(one, fewest[one.length, one.ranks]) for one in self.turns]
        return [about, "", *table(head, rows), ""]


def _compared(one: Turns, least: Turns) -> tuple[str, ...]:
    """Return a row of the table of `_flatness`."""
    cells = [f"{one.shards:,}", f"{one.length:,}", f"{one.ranks}"]
    for many, few in ((one.sample_seconds, least.sample_seconds), (one.bare_seconds, least.bare_seconds)):
        ratios = [theirs / its for theirs, its in zip(many, few, strict=True)]
        cells += [_spread([1e6 * x for x in many], 1), "" if one is least else _spread(ratios, 2)]
    return tuple(cells)


def _spread(values: Sequence[float], places: int) -> str:
    """Format median, minimum and maximum."""
    return f"{median(values):.{places}f} ({min(values):.{places}f} to {max(values):.{places}f})"
