"""What a run leaves behind while it trains: records in JSON lines, TensorBoard scalars, a progress line."""

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

from megatron_ext.errors import UserError
from megatron_ext.files import open_to_append, os_reason, read_regular, write_whole
from megatron_ext.json_text import parse_json

METRICS = "metrics.jsonl"
EVALUATION = "evaluation.jsonl"
SUITES = "suites.jsonl"
TENSORBOARD = "tensorboard"
_KEPT = (METRICS, EVALUATION, SUITES)

DATA = "data"
"""Field of a record that says which text it is of: the beginning of a digest."""

_NO_SCALARS = ("step", DATA)


class RunRecords:
    """Writes a run's records; one process of the run has it.

    Args:
        folder: of the run.
        name: shown on the progress line.
        first_step: steps done before: what older records say of later steps is dropped.
        steps: of the whole run.
        guard: called before anything is written; raises where this process may not.
        texts: what each line of a file says of its data, by the file's name: METRICS, EVALUATION.

    Attributes:
        last_evaluation: step of the newest evaluation by domain that older records hold; 0: none.
        last_suites: the same of the other suites.
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
        interval = 0.5 if sys.stderr.isatty() else 20.0  # a log file gets a line now and then
        self._bar = tqdm(
            total=steps,
            initial=first_step,
            desc=name,
            unit="step",
            dynamic_ncols=True,
            mininterval=interval,
            delay=interval,  # else a line of zeros comes first
            file=sys.stderr,
        )

    def _open(self, first_step: int) -> None:
        """Open the records after a step. A run without a board, as a branch that begins, gets one of all of them."""
        has_board = any((self._folder / TENSORBOARD).glob("events.*"))
        self._files = {name: _reopened(self._folder / name, first_step) for name in _KEPT}
        self._board = SummaryWriter(str(self._folder / TENSORBOARD), purge_step=first_step + 1 if has_board else 1)
        if not has_board:
            for name in _KEPT:
                for record in _records_of(self._folder / name):
                    self._show(name, record)
            self._board.flush()

    def rewind(self, step: int) -> None:
        """Drop what the records say of later steps, which will be done again.

        Raises:
            UserError: as from `step`.
        """
        with self._writing():
            self._close_files()
            self._open(step)
        self._bar.n = step
        self._bar.refresh()

    def history(self, steps: int) -> list[tuple[float, float]]:
        """Loss and gradient norm of the newest steps that the records hold, as many as there are."""
        lines = read_regular(self._folder / METRICS).decode().splitlines()[-steps:] if steps else []
        return [(record["loss"], record["grad_norm"]) for record in map(parse_json, lines)]

    def flush(self) -> None:
        """Write out the board, which else is written every two minutes: before a checkpoint, so that a run that is
        killed after it and goes on from there has its steps.

        Raises:
            UserError: as from `step`.
        """
        with self._writing():
            self._board.flush()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics of an optimizer step (`step`, `loss`, ...)."""
        with self._writing():
            self._keep(METRICS, metrics)
        told = f"loss {metrics['loss']:.4f}, {metrics['tokens_per_second']:,.0f} tokens/s"
        self._bar.set_postfix_str(told, refresh=False)
        self._bar.update()

    def evaluation(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Keep the records of one evaluation, one a domain."""
        with self._writing():
            for record in records:
                self._keep(EVALUATION, record)
        told = ", ".join(f"{record['domain']} ({record['split']}) {record['loss']:.4f}" for record in records)
        self.say(f"step {records[0]['step']}: {told}" if records else "")

    def suites(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Keep what suites found: step, tokens, suite and its scores by name, a record a suite."""
        with self._writing():
            for record in records:
                self._keep(SUITES, record)
        for record in records:
            self.say(f"step {record['step']}: {record['suite']}: {len(record['scores'])} scores, see evaluation/")

    def say(self, line: str) -> None:
        """Print a line above the progress line."""
        if line:
            self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        """Finish the files.

        Raises:
            UserError: as from `step` and `evaluation`, the disk refuses.
        """
        self._bar.close()
        with self._writing():
            self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._board.flush()  # tells of what its thread could not write; closing does not
        self._board.close()

    def keep(self, name: str, record: Mapping[str, Any]) -> None:
        """Keep a record in a file of another name, which is opened for it alone.

        Raises:
            UserError: as from `step`.
        """
        with self._writing(), open_to_append(self._folder / name) as file:
            file.write(json.dumps(record) + "\n")

    def left_out(self) -> None:
        """A step counts as done, and has no metrics."""
        self._bar.update()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Around whatever writes: a disk that is full or gone is no fault of ours."""
        self._guard()
        try:
            yield
        except OSError as error:
            problem = f"cannot be written ({os_reason(error)})"
            raise UserError(str(self._folder), problem, "make room and start again with --resume=auto") from error

    def _keep(self, name: str, record: Mapping[str, Any]) -> None:
        """One whole line at a time: what a killed run leaves can be read."""
        if name in self._texts:
            record = {**record, DATA: self._texts[name]}
        self._files[name].write(json.dumps(record) + "\n")
        self._files[name].flush()
        self._show(name, record)

    def _show(self, name: str, record: Mapping[str, Any]) -> None:
        for tag, value in _scalars(name, record):
            self._board.add_scalar(tag, value, record["step"])


def _scalars(name: str, record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Tags and values that the board shows of a record."""
    if name == METRICS:
        yield from (
            (f"train/{key}", value) for key, value in record.items() if key not in _NO_SCALARS and value is not None
        )
    elif name == EVALUATION:
        yield f"{record['split']}/{record['domain']}", record["loss"]
    else:
        yield from ((f"{record['suite']}/{score}", value) for score, value in record["scores"].items())


def _records_of(path: Path) -> Iterator[dict[str, Any]]:
    """Whole records of a file, none where there is no file."""
    if not path.exists():
        return
    for line in read_regular(path).decode().splitlines(keepends=True):
        if line.endswith("\n"):
            _step_of(line, path)
            yield parse_json(line)


def _left_to_the_writer(failed: threading.ExceptHookArgs) -> None:
    """TensorBoard keeps the error of its thread for its next call, which raises it: a traceback would say it twice."""
    if not isinstance(failed.thread, _AsyncWriterThread):
        threading.__excepthook__(failed)


def _reopened(path: Path, first_step: int) -> IO[str]:
    """The file, open for appending, without lines of steps that will be done again and without a half-written one."""
    if path.exists():
        kept = [
            line for line in read_regular(path).decode().splitlines(keepends=True) if _step_of(line, path) <= first_step
        ]
        write_whole(path, "".join(f"{line.rstrip()}\n" for line in kept).encode())
    return open_to_append(path)


def lr_at(folder: Path, step: int) -> float | None:
    """Learning rate of a step that a run's records hold, of a step done twice the later one; None: they do not.

    Raises:
        UserError: a line is no record.
    """
    path = folder / METRICS
    lines = read_regular(path).decode().splitlines(keepends=True) if path.exists() else []
    found = [parse_json(line)["lr"] for line in lines if _step_of(line, path) == step]
    return found[-1] if found else None


def copy_records(source: Path, folder: Path) -> None:
    """Let the records of a run begin with those of another; its board shows them once it has begun.

    What the run wrote before is of a start that did not come to a checkpoint.
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
        if not line.endswith("\n"):  # what a killed run was writing
            return float("inf")
        raise UserError(
            str(path), f"has a line that is no record: {line.rstrip()[:60]!r}", "remove that line"
        ) from None
