"""Common report of benchmarks of a training run, which names the configuration."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.bench.arguments import save_into
from kernels.bench.bench_report import BenchReport
from megatron_ext.bench.processes import is_first_rank


@dataclass(frozen=True, kw_only=True)
class RunReport(BenchReport):
    """Report of a benchmark of one run.

    Attributes:
        name: of the configuration.
        overrides: of the configuration.
        processes: number of processes.
    """

    name: str
    overrides: tuple[str, ...]
    processes: int

    @abstractmethod
    def about(self) -> str:
        """Describe the measurements, as a continuation of the sentence on the configuration and processes."""

    @abstractmethod
    def table(self) -> list[str]:
        """Return the lines of the Markdown table."""

    def to_dict(self) -> dict[str, Any]:
        """Return the machine, the run and all numbers."""
        identity = {"configuration": self.name, "overrides": list(self.overrides), "processes": self.processes}
        return {"machine": self.machine, **identity, **self.numbers()}

    def body(self) -> list[str]:
        """Return the run and the table."""
        run = f"`{' '.join([self.name, *self.overrides])}`, {self.processes} processes"
        return [run + self.about(), "", *self.table()]


def publish(report: RunReport, folder: Path) -> None:
    """Write a report and print its table, on the first rank.

    Raises:
        OptionError: the folder cannot be written.
    """
    if is_first_rank():
        save_into(folder, report.write)
        print(report.markdown())
