"""Base classes of the benchmarks' reports and rows, and the description of the machine."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from kernels.bench.timing import Times
from megatron_ext.utils import git_info
from megatron_ext.utils.markdown import format_number, write_report


class Timed(Protocol):
    """Measurements with the times of the repetitions."""

    @property
    def times(self) -> Times:
        """Milliseconds."""


M = TypeVar("M", bound=Timed)


@dataclass(frozen=True, kw_only=True)
class BenchRow(Generic[M]):
    """Result of one contestant in one case: measured, failed or not run.

    Attributes:
        measured: measurements, if the result was correct.
        failed: error of one of this package's implementations.
        not_run: reason why it did not run.
    """

    measured: M | None = None
    failed: str | None = None
    not_run: str | None = None

    @property
    def summary(self) -> str:
        """Short form of the result."""
        if self.measured is not None:
            return f"{format_number(self.measured.times.median)} ms"
        return f"failed: {self.failed}" if self.failed is not None else f"not run: {self.not_run}"


R = TypeVar("R", bound=BenchRow[Any])


@dataclass(frozen=True, kw_only=True)
class BenchReport(ABC):
    """Report of a benchmark, written as JSON and as Markdown.

    Attributes:
        machine: description of the machine, see `describe_machine`.
    """

    stem: ClassVar[str]
    """Stem of the file names."""

    machine: dict[str, str | None]

    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """Return all numbers for JSON, with units in their names."""

    @abstractmethod
    def body(self) -> Sequence[str]:
        """Return the lines of Markdown below the machine: what was measured, tables, notes."""

    def to_dict(self) -> dict[str, Any]:
        """Return the machine and all numbers."""
        return {"machine": self.machine, **self.numbers()}

    def markdown(self) -> str:
        """Return the text with the machine in its first line."""
        return "\n".join([machine_line(self.machine), "", *self.body()]) + "\n"

    def write(self, folder: Path) -> None:
        """Write STEM.json and STEM.md, each atomically."""
        write_report(folder, self.stem, self.to_dict(), self.markdown())


@dataclass(frozen=True, kw_only=True)
class ContestReport(BenchReport, Generic[R]):
    """Report of contestants in several cases.

    Attributes:
        rows: results, in the order of the table.
    """

    rows: list[R]

    @property
    def failures(self) -> list[R]:
        """Rows of this package's implementations that were wrong or did not run."""
        return [row for row in self.rows if row.failed is not None]


def describe_machine(device: torch.device) -> dict[str, str | None]:
    """Return GPU, driver, versions, commit and date; None for what is unknown."""
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "driver": git_info.first_output_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "fla": version("flash-linear-attention"),
        "python": platform.python_version(),
        "commit": git_info.commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine_line(machine: Mapping[str, str | None]) -> str:
    """Return the description of a machine as a sentence."""
    return "Machine: " + ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None) + "."


def version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
