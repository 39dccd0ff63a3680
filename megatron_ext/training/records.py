"""Records that a run writes while it trains, through its loggers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from megatron_ext.run_folder.layout import EVALUATION, METRICS, SUITES, TENSORBOARD, tracker_file_name
from megatron_ext.training.loggers.core.base import LoggedRun, Logger
from megatron_ext.training.loggers.core.registry import check_loggers
from megatron_ext.training.loggers.jsonl import FILES, JsonLines, parse_step, read_last_step
from megatron_ext.training.loggers.progress import ProgressLine
from megatron_ext.utils.atomic_files import open_to_append, os_error_reason, read_regular, write_atomically
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json


class RunRecords:
    """Writer of a run's records through its loggers. Only the first rank has a writer.

    Args:
        folder: run folder.
        name: label of the progress bar, and name of the run at tracking services.
        first_step: number of completed steps. Records of later steps are dropped.
        steps: number of steps of the whole run.
        guard: called before each write; raises if this process may no longer write.
        texts: value of the field `data` in each record, by file name (METRICS, EVALUATION).
        backends: names of loggers besides the record files and the progress line, see `LoggingConfig`.
        settings: configuration and model size for the loggers, see `LoggedRun`.

    Attributes:
        last_evaluation: step of the newest evaluation by domain in the existing records; 0 if there is none.
        last_suites: step of the newest results of the other suites; 0 if there are none.

    Raises:
        UserError: a file contains a line that is not a record.
        OSError: a file cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        first_step: int,
        steps: int,
        guard: Callable[[], object] = lambda: None,
        texts: Mapping[str, str] | None = None,
        backends: Sequence[str] = ("tensorboard",),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder, self._guard = folder, guard
        run = LoggedRun(folder, name, steps, texts or {}, settings or {})
        self._jsonl, self._progress = JsonLines(run), ProgressLine(run)
        # The record files come first, so that they contain everything that the other loggers have received.
        self._writers: list[Logger] = [self._jsonl, *(entry.kind(run) for entry in check_loggers(backends))]
        self._start(first_step)
        self.last_evaluation, self.last_suites = (read_last_step(folder / name) for name in (EVALUATION, SUITES))

    def _start(self, step: int) -> None:
        start = self._jsonl.drop_later_records(step)
        for logger in (*self._writers, self._progress):
            logger.start(start)

    def rewind(self, step: int) -> None:
        """Drop the records of later steps, which will be repeated.

        Raises:
            UserError: see `step`.
        """
        with self._guarded_write():
            self._start(step)

    def history(self, steps: int) -> list[tuple[float, float]]:
        """Return loss and gradient norm of the newest steps in the records, at most `steps` pairs."""
        lines = read_regular(self._folder / METRICS).decode().splitlines()[-steps:] if steps else []
        return [(record["loss"], record["grad_norm"]) for record in map(parse_json, lines)]

    def flush(self) -> None:
        """Flush the record files and the loggers of `backends`.

        Call this method before a checkpoint is written. A run that is killed later and resumes from the checkpoint then
        has the records of all steps before it.

        Raises:
            UserError: see `step`.
        """
        with self._guarded_write():
            for logger in self._writers:
                logger.flush()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of an optimizer step (`step`, `loss`, ...).

        Raises:
            UserError: a file cannot be written.
        """
        self._record(METRICS, [metrics])

    def evaluation(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Log the records of one evaluation, one per domain."""
        self._record(EVALUATION, records)
        self._progress.print_evaluations(EVALUATION, records)

    def suites(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Log the results of suites, one record per suite: step, tokens, suite and its scores by name."""
        self._record(SUITES, records)
        self._progress.print_evaluations(SUITES, records)

    def _record(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        with self._guarded_write():
            for record in records:
                for logger in self._writers:
                    logger.record(name, record)
        for record in records:  # outside the context, which attributes each OSError to the run folder
            self._progress.record(name, record)

    def print_line(self, line: str) -> None:
        """Print a line above the progress bar."""
        self._progress.print_line(line)

    def close(self) -> None:
        """Close all loggers, even if one fails. The progress line is closed last, so that no warning is mixed with it.

        Raises:
            UserError: see `step`.
        """
        with ExitStack() as stack:
            stack.callback(self._progress.close)
            stack.enter_context(self._guarded_write())
            for logger in self._writers:
                stack.callback(logger.close)

    def append_record(self, name: str, record: Mapping[str, Any]) -> None:
        """Append a record to the file `name`, which is opened and closed for each record.

        Raises:
            UserError: see `step`.
        """
        with self._guarded_write(), open_to_append(self._folder / name) as file:
            file.write(json.dumps(record) + "\n")

    def skip_step(self) -> None:
        """Advance the progress bar by a step that has no metrics."""
        self._progress.log({}, 0)

    @contextmanager
    def _guarded_write(self) -> Iterator[None]:
        """Context manager for writes: call the guard, and raise an OSError as a UserError."""
        self._guard()
        try:
            yield
        except OSError as error:
            problem = f"cannot be written ({os_error_reason(error)})"
            raise UserError(str(self._folder), problem, "free disk space and start again with --resume=auto") from error


def recorded_lr(folder: Path, step: int) -> float | None:
    """Return the recorded learning rate of a step, from its last record if it was repeated; None without a record.

    Raises:
        UserError: a line is not a valid record.
    """
    path = folder / METRICS
    lines = read_regular(path).decode().splitlines(keepends=True) if path.exists() else []
    found = [parse_json(line)["lr"] for line in lines if parse_step(line, path) == step]
    return found[-1] if found else None


def copy_records(source: Path, folder: Path) -> None:
    """Replace the records of a run by those of another run. `RunRecords` later passes them to the other loggers.

    Previous records of the run stem from a start that reached no checkpoint.
    """
    if (folder / TENSORBOARD).exists():
        shutil.rmtree(folder / TENSORBOARD)
    for path in folder.glob(tracker_file_name("*")):
        path.unlink()
    for name in FILES:
        if (source / name).exists():
            write_atomically(folder / name, read_regular(source / name))
