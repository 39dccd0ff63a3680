"""What a run leaves behind while it trains: records in JSON lines, TensorBoard scalars, a progress line."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from megatron_ext.errors import UserError
from megatron_ext.files import write_whole

METRICS = "metrics.jsonl"
EVALUATION = "evaluation.jsonl"
SUITES = "suites.jsonl"
TENSORBOARD = "tensorboard"


class RunRecords:
    """Writes a run's records; one process of the run has it.

    Args:
        folder: of the run.
        name: shown on the progress line.
        first_step: steps done before: what older records say of later steps is dropped.
        steps: of the whole run.

    Attributes:
        last_evaluation: step of the newest evaluation by domain that older records hold; 0: none.
        last_suites: the same of the other suites.
    """

    def __init__(self, folder: Path, name: str, first_step: int, steps: int) -> None:
        self._folder = folder
        self._files = {name: _reopened(folder / name, first_step) for name in (METRICS, EVALUATION, SUITES)}
        self.last_evaluation, self.last_suites = (_last_step(folder / name) for name in (EVALUATION, SUITES))
        threading.excepthook = _left_to_the_writer
        self._board = SummaryWriter(str(folder / TENSORBOARD), purge_step=first_step + 1)
        self._bar = tqdm(
            total=steps,
            initial=first_step,
            desc=name,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 20.0,  # a log file gets a line now and then
            file=sys.stderr,
        )

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics of an optimizer step (`step`, `loss`, ...)."""
        with self._writing():
            self._append(METRICS, metrics)
            for key, value in metrics.items():
                if key != "step" and value is not None:
                    self._board.add_scalar(f"train/{key}", value, metrics["step"])
        told = f"loss {metrics['loss']:.4f}, {metrics['tokens_per_second']:,.0f} tokens/s"
        self._bar.set_postfix_str(told, refresh=False)
        self._bar.update()

    def evaluation(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Keep the records of one evaluation, one a domain."""
        with self._writing():
            for record in records:
                self._append(EVALUATION, record)
                self._board.add_scalar(f"{record['split']}/{record['domain']}", record["loss"], record["step"])
        told = ", ".join(f"{record['domain']} ({record['split']}) {record['loss']:.4f}" for record in records)
        self.say(f"step {records[0]['step']}: {told}" if records else "")

    def suites(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Keep what suites found: step, tokens, suite and its scores by name, a record a suite."""
        with self._writing():
            for record in records:
                self._append(SUITES, record)
                for name, score in record["scores"].items():
                    self._board.add_scalar(f"{record['suite']}/{name}", score, record["step"])
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
            for file in self._files.values():
                file.close()
            self._board.flush()  # tells of what its thread could not write; closing does not
            self._board.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Around whatever writes: a disk that is full or gone is no fault of ours."""
        try:
            yield
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
            raise UserError(str(self._folder), problem, "make room and start again with --resume") from error

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        """One whole line at a time: what a killed run leaves can be read."""
        self._files[name].write(json.dumps(record) + "\n")
        self._files[name].flush()


def _left_to_the_writer(failed: threading.ExceptHookArgs) -> None:
    """TensorBoard keeps the error of its thread for its next call, which raises it: a traceback would say it twice."""
    if not isinstance(failed.thread, _AsyncWriterThread):
        threading.__excepthook__(failed)


def _reopened(path: Path, first_step: int) -> IO[str]:
    """The file, open for appending, without lines of steps that will be done again and without a half-written one."""
    if path.exists():
        kept = [line for line in path.read_text().splitlines(keepends=True) if _step_of(line, path) <= first_step]
        write_whole(path, "".join(f"{line.rstrip()}\n" for line in kept).encode())
    return path.open("a")


def lr_at(folder: Path, step: int) -> float | None:
    """Learning rate of a step that a run's records hold, of a step done twice the later one; None: they do not.

    Raises:
        UserError: a line is no record.
    """
    path = folder / METRICS
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line)["lr"] for line in lines if _step_of(line, path) == step]
    return found[-1] if found else None


def copy_records(source: Path, folder: Path) -> None:
    """Let the records of a run begin with those of another."""
    for name in (METRICS, EVALUATION, SUITES):
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def _last_step(path: Path) -> int:
    lines = path.read_text().splitlines(keepends=True)
    return int(max((_step_of(line, path) for line in lines), default=0))


def _step_of(line: str, path: Path) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        if not line.endswith("\n"):  # what a killed run was writing
            return float("inf")
        raise UserError(
            str(path), f"has a line that is no record: {line.rstrip()[:60]!r}", "remove that line"
        ) from None
