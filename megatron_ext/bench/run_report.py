"""Common report of benchmarks of a training run: configuration and machine, numbers as JSON and as a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kernels.bench.arguments import save_into
from kernels.bench.report import machine_line
from megatron_ext.bench.processes import is_first
from megatron_ext.utils.markdown import write_both


@dataclass(frozen=True, kw_only=True)
class RunReport(ABC):
    """Report of a benchmark of one run.

    Attributes:
        name: of the configuration.
        overrides: of the configuration.
        processes: number of processes.
        machine: description of the machine.
    """

    stem: ClassVar[str]
    """Stem of its file names."""

    name: str
    overrides: tuple[str, ...]
    processes: int
    machine: dict[str, str | None]

    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """Return all numbers by name, for JSON."""

    @abstractmethod
    def about(self) -> str:
        """Describe what the table's numbers are medians of, as a continuation of the sentence about processes."""

    @abstractmethod
    def table(self) -> list[str]:
        """Return the lines of the Markdown table."""

    def to_dict(self) -> dict[str, Any]:
        """Return the run, the machine and all numbers."""
        which = {"configuration": self.name, "overrides": list(self.overrides), "processes": self.processes}
        return {"machine": self.machine, **which, **self.numbers()}

    def markdown(self) -> str:
        """Return the table with machine and run above it."""
        run = f"`{' '.join([self.name, *self.overrides])}`, {self.processes} processes"
        return "\n".join([machine_line(self.machine), "", run + self.about(), "", *self.table()]) + "\n"

    def write(self, folder: Path) -> None:
        """Write STEM.json and STEM.md, each atomically."""
        write_both(folder, self.stem, self.to_dict(), self.markdown())


def publish(report: RunReport, folder: Path) -> None:
    """Write a report and print its table, on the first rank.

    Raises:
        OptionError: the folder cannot be written.
    """
    if is_first():
        save_into(folder, partial(RunReport.write, report))
        print(report.markdown())
