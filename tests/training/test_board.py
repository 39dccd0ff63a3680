"""TensorBoard shows the values of the records, also for killed runs and branches."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_ext.run_folder.layout import EVALUATION, METRICS, SUITES, TENSORBOARD
from megatron_ext.training.records import RunRecords, copy_records


def train(folder: Path, first: int, last: int, *, saved: int = 0, end: str = "close", loss: float = 10.0) -> None:
    """Write the records of steps `first` to `last`, with a test every third step and optionally a checkpoint."""
    make_older(folder / TENSORBOARD)
    records = RunRecords(folder, "run", first, 100)
    for step in range(first + 1, last + 1):
        records.step(
            {"step": step, "loss": loss / step, "grad_norm": 0.5 * step, "tokens_per_second": 1.0, "mfu": None}
        )
        if step % 3 == 0:
            records.evaluation([{"step": step, "split": "test", "domain": "Code", "loss": 2.0 / step}])
            records.suites([{"step": step, "suite": "retrieval", "tokens": step, "scores": {"mqar/64": 1.0 / step}}])
        if step == saved:
            records.flush()
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    records.close()


def make_older(board: Path) -> None:
    """Rename the event files so that their names are a second older. Files are read in the order of these seconds.

    This is faster than `wait_for_another_second`, but no writer may have the files open.
    """
    for path in board.glob("events.*"):
        *start, seconds, rest = path.name.split(".", 4)
        path.rename(path.with_name(".".join([*start, str(int(seconds) - 1), rest])))


def wait_for_another_second(board: Path) -> None:
    """Wait for the next second while a writer has the event files open."""
    seconds = max((int(path.name.split(".")[3]) for path in board.glob("events.*")), default=0)
    time.sleep(max(0.0, seconds + 1 - time.time()))


def killed(folder: Path, first: int, last: int, *, saved: int = 0, loss: float = 10.0) -> None:
    """Call `train` in a process that ends by SIGKILL and loses its unwritten events."""
    context = multiprocessing.get_context("fork")  # a new interpreter would import for seconds
    process = context.Process(
        target=train, args=(folder, first, last), kwargs={"saved": saved, "end": "kill", "loss": loss}
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def lines(folder: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by tag, in the order of TensorBoard."""
    events = EventAccumulator(str(folder / TENSORBOARD)).Reload()
    return {tag: [(one.step, round(one.value, 5)) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def check(folder: Path, steps: int) -> None:
    """Check that TensorBoard and the records have every step once, with equal values."""
    shown = board(folder)
    assert shown.keys() == {
        *(f"train/{name}" for name in ("loss", "grad_norm", "tokens_per_second")),
        "test/Code",
        "retrieval/mqar/64",
    }
    assert [step for step, _ in shown["train/loss"]] == list(range(1, steps + 1))
    for name in ("loss", "grad_norm"):
        assert shown[f"train/{name}"] == [(one["step"], round(one[name], 5)) for one in lines(folder, METRICS)]
    assert shown["test/Code"] == [(one["step"], round(one["loss"], 5)) for one in lines(folder, EVALUATION)]
    assert [step for step, _ in shown["retrieval/mqar/64"]] == [one["step"] for one in lines(folder, SUITES)]


def test_run_killed_and_resumed(tmp_path: Path) -> None:
    killed(tmp_path, 0, 8, saved=6)
    train(tmp_path, 6, 10)
    check(tmp_path, 10)


def test_run_killed_repeatedly(tmp_path: Path) -> None:
    train(tmp_path, 0, 4)
    for first, last, saved in ((3, 7, 6), (6, 9, 8), (0, 2, 2), (2, 8, 8), (8, 11, 10)):
        killed(tmp_path, first, last, saved=saved, loss=10.0 + first)
    train(tmp_path, 10, 12)
    check(tmp_path, 12)


def test_branch_starts_with_its_trunks_records(tmp_path: Path) -> None:
    trunk, branch = tmp_path / "trunk", tmp_path / "branch"
    trunk.mkdir()
    train(trunk, 0, 9)
    branch.mkdir()
    copy_records(trunk, branch)
    train(branch, 6, 8, loss=7.0)
    check(branch, 8)
    assert board(branch)["train/loss"][:6] == board(trunk)["train/loss"][:6]
    check(trunk, 9)


def test_branch_killed_before_its_first_checkpoint_restarts(tmp_path: Path) -> None:
    trunk, branch = tmp_path / "trunk", tmp_path / "branch"
    trunk.mkdir()
    train(trunk, 0, 9)
    branch.mkdir()
    copy_records(trunk, branch)
    killed(branch, 6, 8)
    copy_records(trunk, branch)
    train(branch, 6, 7)
    check(branch, 7)


def test_removed_tensorboard_folder_is_recreated(tmp_path: Path) -> None:
    train(tmp_path, 0, 6)
    for path in (tmp_path / TENSORBOARD).iterdir():
        path.unlink()
    train(tmp_path, 6, 9)
    check(tmp_path, 9)


def test_a_run_that_rolls_back(tmp_path: Path) -> None:
    train(tmp_path, 0, 6)
    make_older(tmp_path / TENSORBOARD)
    records = RunRecords(tmp_path, "run", 6, 100)
    wait_for_another_second(tmp_path / TENSORBOARD)
    records.rewind(4)
    records.close()
    train(tmp_path, 4, 7, loss=9.0)
    check(tmp_path, 7)
