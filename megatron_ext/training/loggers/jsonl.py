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
        """Open the files. Their records of later steps were dropped by `drop_later`."""
        self._files = {name: open_to_append(self.run.folder / name) for name in FILES}

    def drop_later(self, step: int) -> Start:
        """Drop the records of later steps and an incomplete last line, and return the start of all loggers."""
        self.close()
        counts = [_cut(self.run.folder / name, step) for name in FILES]
        return Start(step, self._history, sum(kept for kept, _ in counts), any(dropped for _, dropped in counts))

    def _history(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name in FILES:
            yield from ((name, record) for record in records_of(self.run.folder / name))

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


def _cut(path: Path, last_step: int) -> tuple[int, bool]:
    """Remove later steps, which will be repeated, and an incomplete last line.

    Returns:
        Number of remaining records, and whether complete records were removed.
    """
    if not path.exists():
        return 0, False
    lines = read_regular(path).decode().splitlines(keepends=True)
    kept = [line for line in lines if step_of(line, path) <= last_step]
    write_atomically(path, "".join(f"{line.rstrip()}\n" for line in kept).encode())
    complete = [line for line in lines if line.endswith("\n")]
    return len(kept), len(complete) > len(kept)


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete records of a file; none if it does not exist."""
    if not path.exists():
        return
    for line in read_regular(path).decode().splitlines(keepends=True):
        if line.endswith("\n"):
            step_of(line, path)
            yield parse_json(line)


def last_step(path: Path) -> int:
    """Return the last step in a file; 0: it is empty."""
    lines = read_regular(path).decode().splitlines(keepends=True)
    return int(max((step_of(line, path) for line in lines), default=0))


def step_of(line: str, path: Path) -> float:
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
            str(path), f"has a line that is no record: {line.rstrip()[:60]!r}", "remove that line"
        ) from None
