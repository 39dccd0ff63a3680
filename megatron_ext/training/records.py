"""Records that a run writes while it trains: JSON lines, TensorBoard scalars, a progress bar."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from megatron_ext.run_folder.layout import EVALUATION, METRICS, SUITES, TENSORBOARD
from megatron_ext.utils.atomic_files import open_to_append, os_reason, read_regular, write_whole
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json

_KEPT = (METRICS, EVALUATION, SUITES)

DATA = "data"
"""Field of a record with the first digits of the digest of the text it refers to."""

_NO_SCALARS = ("step", DATA)


class RunRecords:
    """Write the records of a run; only the first rank has one.

    Args:
        folder: of the run.
        name: label of the progress bar.
        first_step: number of completed steps. Records of later steps are dropped.
        steps: of the whole run.
        guard: called before each write; raises if this process may no longer write.
        texts: value of the field `DATA` in each record, by file name (METRICS, EVALUATION).

    Attributes:
        last_evaluation: step of the newest evaluation by domain in the existing records; 0: none.
        last_suites: step of the newest results of the other suites; 0: none.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        first_step: int,
        steps: int,
        guard: Callable[[], object] = lambda: None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        self._folder, self._guard, self._texts = folder, guard, texts or {}
        threading.excepthook = _left_to_the_writer
        self._open(first_step)
        self.last_evaluation, self.last_suites = (_last_step(folder / name) for name in (EVALUATION, SUITES))
        interval = 0.5 if sys.stderr.isatty() else 20.0  # fewer lines in a log file
        self._bar = tqdm(
            total=steps,
            initial=first_step,
            desc=name,
            unit="step",
            dynamic_ncols=True,
            mininterval=interval,
            delay=interval,  # otherwise the first line shows zeros
            file=sys.stderr,
        )

    def _open(self, first_step: int) -> None:
        """Open the record files without later steps. Without TensorBoard files (new branch), add all records."""
        has_board = any((self._folder / TENSORBOARD).glob("events.*"))
        self._files = {name: _reopened(self._folder / name, first_step) for name in _KEPT}
        self._board = SummaryWriter(str(self._folder / TENSORBOARD), purge_step=first_step + 1 if has_board else 1)
        if not has_board:
            for name in _KEPT:
                for record in _records_of(self._folder / name):
                    self._show(name, record)
            self._board.flush()

    def rewind(self, step: int) -> None:
        """Drop the records of later steps, which will be repeated.

        Raises:
            UserError: see `step`.
        """
        with self._writing():
            self._close_files()
            self._open(step)
        self._bar.n = step
        self._bar.refresh()

    def history(self, steps: int) -> list[tuple[float, float]]:
        """Return loss and gradient norm of the newest steps in the records, at most `steps` pairs."""
        lines = read_regular(self._folder / METRICS).decode().splitlines()[-steps:] if steps else []
        return [(record["loss"], record["grad_norm"]) for record in map(parse_json, lines)]

    def flush(self) -> None:
        """Flush the TensorBoard file, which is otherwise written every two minutes.

        Call it before a checkpoint: a run that is killed afterwards and resumes from it then has the steps before it.

        Raises:
            UserError: see `step`.
        """
        with self._writing():
            self._board.flush()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of an optimizer step (`step`, `loss`, ...).

        Raises:
            UserError: a file cannot be written.
        """
        with self._writing():
            self._keep(METRICS, metrics)
        told = f"loss {metrics['loss']:.4f}, {metrics['tokens_per_second']:,.0f} tokens/s"
        self._bar.set_postfix_str(told, refresh=False)
        self._bar.update()

    def evaluation(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the records of one evaluation, one per domain."""
        with self._writing():
            for record in records:
                self._keep(EVALUATION, record)
        told = ", ".join(f"{record['domain']} ({record['split']}) {record['loss']:.4f}" for record in records)
        self.say(f"step {records[0]['step']}: {told}" if records else "")

    def suites(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the results of suites, one record per suite: step, tokens, suite and its scores by name."""
        with self._writing():
            for record in records:
                self._keep(SUITES, record)
        for record in records:
            self.say(f"step {record['step']}: {record['suite']}: {len(record['scores'])} scores, see evaluation/")

    def say(self, line: str) -> None:
        """Print a line above the progress bar."""
        if line:
            self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        """Close the files.

        Raises:
            UserError: see `step`.
        """
        self._bar.close()
        with self._writing():
            self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._board.flush()  # raises the write errors of its thread; closing does not
        self._board.close()

    def keep(self, name: str, record: Mapping[str, Any]) -> None:
        """Append a record to another file, which is opened for this record alone.

        Raises:
            UserError: see `step`.
        """
        with self._writing(), open_to_append(self._folder / name) as file:
            file.write(json.dumps(record) + "\n")

    def left_out(self) -> None:
        """Advance the progress bar by a step that has no metrics."""
        self._bar.update()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Context manager for writes: call the guard, and raise an OSError as a UserError."""
        self._guard()
        try:
            yield
        except OSError as error:
            problem = f"cannot be written ({os_reason(error)})"
            raise UserError(str(self._folder), problem, "make room and start again with --resume=auto") from error

    def _keep(self, name: str, record: Mapping[str, Any]) -> None:
        """Write one whole line and flush, so that a killed run leaves readable records."""
        if name in self._texts:
            record = {**record, DATA: self._texts[name]}
        self._files[name].write(json.dumps(record) + "\n")
        self._files[name].flush()
        self._show(name, record)

    def _show(self, name: str, record: Mapping[str, Any]) -> None:
        for tag, value in _scalars(name, record):
            self._board.add_scalar(tag, value, record["step"])


def _scalars(name: str, record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the TensorBoard tags and values of a record."""
    if name == METRICS:
        yield from (
            (f"train/{key}", value) for key, value in record.items() if key not in _NO_SCALARS and value is not None
        )
    elif name == EVALUATION:
        yield f"{record['split']}/{record['domain']}", record["loss"]
    else:
        yield from ((f"{record['suite']}/{score}", value) for score, value in record["scores"].items())


def _records_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete records of a file; none if it does not exist."""
    if not path.exists():
        return
    for line in read_regular(path).decode().splitlines(keepends=True):
        if line.endswith("\n"):
            _step_of(line, path)
            yield parse_json(line)


def _left_to_the_writer(failed: threading.ExceptHookArgs) -> None:
    """Ignore errors of TensorBoard's writer thread: its next call raises them, so a traceback would be a repetition."""
    if not isinstance(failed.thread, _AsyncWriterThread):
        threading.__excepthook__(failed)


def _reopened(path: Path, first_step: int) -> IO[str]:
    """Open a file to append, without records of steps that will be repeated and without an incomplete last line."""
    if path.exists():
        kept = [
            line for line in read_regular(path).decode().splitlines(keepends=True) if _step_of(line, path) <= first_step
        ]
        write_whole(path, "".join(f"{line.rstrip()}\n" for line in kept).encode())
    return open_to_append(path)


def lr_at(folder: Path, step: int) -> float | None:
    """Return the recorded learning rate of a step (the last record if it was repeated); None: there is no record.

    Raises:
        UserError: a line is not a valid record.
    """
    path = folder / METRICS
    lines = read_regular(path).decode().splitlines(keepends=True) if path.exists() else []
    found = [parse_json(line)["lr"] for line in lines if _step_of(line, path) == step]
    return found[-1] if found else None


def copy_records(source: Path, folder: Path) -> None:
    """Replace the records of a run by those of another. `RunRecords` then adds them to TensorBoard.

    Previous records of the run stem from a start that reached no checkpoint.
    """
    if (folder / TENSORBOARD).exists():
        shutil.rmtree(folder / TENSORBOARD)
    for name in _KEPT:
        if (source / name).exists():
            write_whole(folder / name, read_regular(source / name))


def _last_step(path: Path) -> int:
    lines = read_regular(path).decode().splitlines(keepends=True)
    return int(max((_step_of(line, path) for line in lines), default=0))


def _step_of(line: str, path: Path) -> float:
    try:
        return int(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        if not line.endswith("\n"):  # incomplete line of a killed run
            return float("inf")
        raise UserError(
            str(path), f"has a line that is no record: {line.rstrip()[:60]!r}", "remove that line"
        ) from None
