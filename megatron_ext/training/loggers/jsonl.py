"""Record files: JSON lines that resuming and reports read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from megatron_ext.run_folder.layout import EVALUATION, METRICS, SUITES
from megatron_ext.training.loggers.core.base import DATA, LoggedRun, Logger, Start
from megatron_ext.training.loggers.core.registry import register
from megatron_ext.utils.atomic_files import open_to_append, read_regular, write_atomically
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json

FILES = (METRICS, EVALUATION, SUITES)


@register("jsonl")
class JsonLines(Logger):
    """Append each record to its file as one line, unchanged."""

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self._files: dict[str, IO[str]] = {}

    def start(self, start: Start) -> None:
        """Open the files. Their records of later steps were dropped by `drop_later_records`."""
        self._files = {name: open_to_append(self.run.folder / name) for name in FILES}

    def drop_later_records(self, step: int) -> Start:
        """Drop the records of later steps and an incomplete last line, and return the start of all loggers."""
        self.close()
        counts = [_drop_later_lines(self.run.folder / name, step) for name in FILES]
        num_kept, has_dropped = sum(kept for kept, _ in counts), any(dropped for _, dropped in counts)
        return Start(step, self._history, num_kept, has_dropped)

    def _history(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name in FILES:
            yield from ((name, record) for record in read_records(self.run.folder / name))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Do nothing: the files contain records."""

    def record(self, name: str, record: Mapping[str, Any]) -> None:
        """Write one whole line and flush, so that a killed run leaves readable records."""
        if name in self.run.texts:
            record = {**record, DATA: self.run.texts[name]}
        self._files[name].write(json.dumps(record) + "\n")
        self._files[name].flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def _drop_later_lines(path: Path, last_step: int) -> tuple[int, bool]:
    """Remove later steps, which will be repeated, and an incomplete last line.

    Returns:
        Number of remaining records, and whether complete records were removed.
    """
    if not path.exists():
        return 0, False
    lines = read_regular(path).decode().splitlines(keepends=True)
    kept_lines = [line for line in lines if parse_step(line, path) <= last_step]
    write_atomically(path, "".join(f"{line.rstrip()}\n" for line in kept_lines).encode())
    complete_lines = [line for line in lines if line.endswith("\n")]
    return len(kept_lines), len(complete_lines) > len(kept_lines)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete records of a file; none if it does not exist."""
    if not path.exists():
        return
    for line in read_regular(path).decode().splitlines(keepends=True):
        if line.endswith("\n"):
            parse_step(line, path)
            yield parse_json(line)


def read_last_step(path: Path) -> int:
    """Return the last step in a file; 0: it is empty."""
    lines = read_regular(path).decode().splitlines(keepends=True)
    return int(max((parse_step(line, path) for line in lines), default=0))


def parse_step(line: str, path: Path) -> float:
    """Return the step of a line; infinity if the line is incomplete.

    Raises:
        UserError: the line is complete and not a record.
    """
    try:
        return int(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        if not line.endswith("\n"):  # incomplete line of a killed run
            return float("inf")
        raise UserError(
            str(path), f"has a line that is not a record: {line.rstrip()[:60]!r}", "remove that line"
        ) from None
