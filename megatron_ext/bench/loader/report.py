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
        speeds = ("million tokens/s", "million tokens per CPU second", "of the upper bound")
        head = ("shards", "tokens per sample", "samples per batch", "ranks", "files", *speeds)
        rows = [
            (
                f"{row.shards:,}",
                f"{row.length:,}",
                f"{row.batch}",
                f"{row.ranks}",
                "on disk" if row.cold else "in page cache",
                f"{row.tokens_per_second / 1e6:.1f}",
                f"{row.tokens_per_processor_second / 1e6:.1f}",
                f"{100 * row.tokens_per_processor_second / row.floor:.0f} %",
            )
            for row in self.rows
        ]
        resumes = [
            (
                f"{resume.shards:,}",
                f"{resume.length:,}",
                f"{resume.sample:,}",
                f"{1e3 * resume.seconds:.0f}",
                f"{1e3 * resume.seconds_checked:.0f}",
            )
            for resume in self.resumes
        ]
        about = (
            f"{self.data}. Each row was read for {self.seconds:g} s. Upper bound: rate at which one core copies 30 "
            "bytes per token in memory, measured with each row. A token has 30 bytes in its shard and batch together."
        )
        return [
            about,
            "",
            *table(head, rows),
            "",
            *self._alternating_section(),
            *table(("shards", "tokens per sample", "first sample", "ms", "ms with data.verify sha256"), resumes),
        ]

    def _alternating_section(self) -> list[str]:
        """Return a table of the time per sample by number of shards; empty for a single number of shards."""
        if not self.turns:
            return []
        about = (
            "CPU microseconds per sample, with files in the page cache and open shards. Each process reads the folders "
            f"in alternation, {self.seconds:g} s each. Values are medians over all rounds, with minimum and maximum. "
            "Ratios compare with the fewest shards in the same round. Raw reads copy as many bytes as a sample spans, "
            "from random positions, into one buffer."
        )
        head = ("shards", "tokens per sample", "ranks", "microseconds", "ratio", "raw read", "ratio of raw reads")
        fewest = {(turns.length, turns.ranks): turns for turns in sorted(self.turns, key=lambda turns: -turns.shards)}
        rows = [_alternating_row(turns, fewest[turns.length, turns.ranks]) for turns in self.turns]
        return [about, "", *table(head, rows), ""]


def _alternating_row(turns: Turns, reference: Turns) -> tuple[str, ...]:
    """Return a row of the table of `_alternating_section`."""
    cells = [f"{turns.shards:,}", f"{turns.length:,}", f"{turns.ranks}"]
    pairs = (turns.sample_seconds, reference.sample_seconds), (turns.bare_seconds, reference.bare_seconds)
    for seconds, reference_seconds in pairs:
        ratios = [a / b for a, b in zip(seconds, reference_seconds, strict=True)]
        cells += [_spread([1e6 * x for x in seconds], 1), "" if turns is reference else _spread(ratios, 2)]
    return tuple(cells)


def _spread(values: Sequence[float], decimals: int) -> str:
    """Format median, minimum and maximum."""
    return f"{median(values):.{decimals}f} ({min(values):.{decimals}f} to {max(values):.{decimals}f})"
