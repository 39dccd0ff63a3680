"""What the benchmarks of a training run report alike: which run it was, where, its numbers as JSON and as a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kernels.bench.arguments import save_into
from kernels.bench.report import machine_line
from megatron_ext.bench.processes import is_first
from megatron_ext.reports import write_both


@dataclass(frozen=True, kw_only=True)
class RunReport(ABC):
    """All of a benchmark of one run.

    Attributes:
        name: of the configuration.
        overrides: laid over it.
        processes: how many.
        machine: where it ran.
    """

    stem: ClassVar[str]
    """Of the names of its files."""

    name: str
    overrides: tuple[str, ...]
    processes: int
    machine: dict[str, str | None]

    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """All of them, by name, as JSON takes them."""

    @abstractmethod
    def about(self) -> str:
        """Of what the table's numbers are medians, as a sentence that goes on from the processes."""

    @abstractmethod
    def table(self) -> list[str]:
        """Lines of the Markdown table."""

    def to_dict(self) -> dict[str, Any]:
        """Which run it was, where, and all numbers."""
        which = {"configuration": self.name, "overrides": list(self.overrides), "processes": self.processes}
        return {"machine": self.machine, **which, **self.numbers()}

    def markdown(self) -> str:
        """The table, with the machine and the run above it."""
        run = f"`{' '.join([self.name, *self.overrides])}`, {self.processes} processes"
        return "\n".join([machine_line(self.machine), "", run + self.about(), "", *self.table()]) + "\n"

    def write(self, folder: Path) -> None:
        """Write STEM.json and STEM.md, each whole or not at all."""
        write_both(folder, self.stem, self.to_dict(), self.markdown())


def publish(report: RunReport, folder: Path) -> None:
    """Write a report and print its table, on the first rank.

    Raises:
        OptionError: the folder cannot be written.
    """
    if is_first():
        save_into(folder, partial(RunReport.write, report))
        print(report.markdown())
