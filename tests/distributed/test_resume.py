"""Runs that are stopped in different ways and resumed: the curve must be the same.

A real command with two processes is stopped by a signal. Ranks of the pool are killed and suspended.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
from pathlib import Path
from unittest.mock import patch

import held
import pytest
import whole_run
from launching import (
    STEPS,
    TP2,
    call,
    curve,
    losses,
    records,
    snapshot,
    start,
    wait_for_step,
    write_config,
)
from pool import WorkerFailed, WorkerPool
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_ext.utils.errors import EXIT_STOPPED


class References:
    """Uninterrupted runs. Each is trained at first use and never changed."""

    def __init__(self, pool: WorkerPool, folder: Path, data: Path) -> None:
        self._pool, self._folder, self._data = pool, folder, data
        self._made: dict[str, Path] = {}

    def __call__(self, layout: str) -> Path:
        """Return the run folder of `one`, `dp2` or `tp2`."""
        if layout not in self._made:
            folder = self._folder / layout
            folder.mkdir()
            config = write_config(folder, self._data, folder)
            # Never in this process: a test may compare what the process prints.
            processes = 1 if layout == "one" else 2
            self._pool.run(whole_run.run, processes, config, TP2 if layout == "tp2" else [])
            self._made[layout] = folder / "run"
        return self._made[layout]


@pytest.fixture(scope="module")
def reference(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory, data: Path) -> References:
    return References(pool, tmp_path_factory.mktemp("references"), data)


@pytest.fixture
def config(tmp_path: Path, data: Path) -> Path:
    """Configuration whose run folder, `tmp_path / "run"`, does not exist yet."""
    return write_config(tmp_path, data, tmp_path)


# --- the same layout: the same bits ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_killed_at_a_random_step_continues_to_the_last_bit(
    tmp_path: Path, config: Path, reference: References, pool: WorkerPool
) -> None:
    folder, seed = tmp_path / "run", random.SystemRandom().randrange(2**32)
    step = random.Random(seed).randint(4, STEPS - 2)  # after the first checkpoint and before the end
    print(f"seed {seed}: killed after step {step}")
    killed = {rank: signal.SIGKILL for rank in range(2)}
    with pytest.raises(WorkerFailed, match="died"):
        pool.run(whole_run.run_with_signals, 2, config, TP2, step, killed, tmp_path / "errors")
    done = len(records(folder))
    assert step <= done < STEPS
    pool.run(whole_run.run, 2, config, TP2, "auto")
    assert curve(folder) == curve(reference("tp2"))
    assert records(folder, "evaluation.jsonl") == records(reference("tp2"), "evaluation.jsonl")
    assert not list((folder / "checkpoints").glob(".*"))
    # TensorBoard shows all recorded steps, including those whose events were lost with the process.
    shown = EventAccumulator(str(folder / "tensorboard")).Reload().Scalars("train/loss")
    assert [one.step for one in shown] == list(range(1, STEPS + 1))
    assert [one.value for one in shown] == pytest.approx(losses(folder), rel=1e-6)


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins_anew(
    tmp_path: Path, config: Path, reference: References, pool: WorkerPool
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(WorkerFailed, match="died"):
        pool.run(whole_run.run_with_signals, 1, config, [], 1, {0: signal.SIGKILL}, tmp_path / "errors")
    assert 1 <= len(records(folder)) < STEPS
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a fast machine may have written checkpoints
    assert call(config, "--resume=auto") == 0
    assert curve(folder) == curve(reference("one"))


@pytest.mark.slow
def test_a_signal_ends_a_run_with_a_checkpoint_from_which_it_continues(
    tmp_path: Path, config: Path, reference: References, pool: WorkerPool
) -> None:
    folder = tmp_path / "run"
    process = start(config, TP2, 2, command=[held.__file__])
    wait_for_step(process, folder, 1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == EXIT_STOPPED, errors
    done = len(records(folder))
    assert 1 <= done < STEPS
    assert f"stopped at step {done} with a checkpoint" in errors
    assert f"selectron train {folder / 'config.yaml'} --processes 2 --resume" in errors
    assert (folder / "checkpoints" / "latest").read_text() == f"step_{done}\n"
    assert "Traceback" not in errors
    # Follow the message: use the configuration that the run has saved.
    pool.run(whole_run.resume, 2, folder / "config.yaml", [])
    assert curve(folder) == curve(reference("tp2"))
    assert records(folder, "evaluation.jsonl") == records(reference("tp2"), "evaluation.jsonl")


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_with_stacks_and_it_continues_to_the_last_bit(
    tmp_path: Path, config: Path, reference: References, pool: WorkerPool
) -> None:
    """A stopped rank is silent and keeps its connections open, as behind a cut link."""
    folder, errors = tmp_path / "run", tmp_path / "errors"
    fields = [*TP2, "run.hang_timeout=1"]
    with pytest.raises(WorkerFailed, match=r"rank 0 died\n(.|\n)*rank\(s\) \[1\] did not answer"):
        pool.run(whole_run.run_with_signals, 2, config, fields, 3, {1: signal.SIGSTOP}, errors)
    assert "Timeout (0:00:01)!" in errors.read_text()
    assert re.search(r"training/loop\.py\", line \d+ in _run\n", errors.read_text())  # a step, evaluation or save
    assert len(records(folder)) < STEPS
    pool.run(whole_run.run, 2, config, TP2, "auto")
    assert curve(folder) == curve(reference("tp2"))


def test_no_weights_are_drawn_that_a_checkpoint_replaces(tmp_path: Path, config: Path, reference: References) -> None:
    folder = tmp_path / "run"
    shutil.copytree(reference("one"), folder)
    with patch("megatron_ext.model.build.initialize_model") as drawing:
        assert call(config, "--from-step", "6") == 0
    drawing.assert_not_called()
    assert curve(folder) == curve(reference("one"))


# --- another layout: the same curve ----------------------------------------------------------------------------------

DP2: list[str] = []
PP2 = ["parallel.pipeline=2"]
CP2 = ["parallel.context=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [("one", TP2), ("dp2", PP2), ("tp2", CP2)],
    ids=["one process to tp2", "dp2 to pp2", "tp2 to cp2"],
)
def test_a_run_continues_on_another_layout(
    before: str, after: list[str], tmp_path: Path, config: Path, reference: References, pool: WorkerPool
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(reference(before), folder)
    pool.run(whole_run.run_from_step, 2, config, after, 3)
    assert losses(folder) == pytest.approx(losses(reference(before)), abs=1e-5, rel=0)
    ours, theirs = (records(r, "evaluation.jsonl") for r in (folder, reference(before)))
    assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in theirs], abs=1e-5, rel=0)
    for field in ("step", "tokens", "domain", "split", "documents", "document_tokens", "num_tokens"):
        assert [r[field] for r in ours] == [r[field] for r in theirs]
    assert curve(folder)[:3] == curve(reference(before))[:3]  # completed steps are kept
    assert (folder / "config.until_step_3.yaml").exists()
    assert (folder / "checkpoints" / "latest").read_text() == f"step_{STEPS}\n"


@pytest.mark.slow
def test_layouts_have_one_curve(reference: References) -> None:
    for layout in ("dp2", "tp2"):
        assert losses(reference(layout)) == pytest.approx(losses(reference("one")), abs=1e-5, rel=0)


# --- refused requests ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_finished_run_says_so_and_stays_as_it_is(
    tmp_path: Path, config: Path, reference: References, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(reference("one"), folder)
    before = snapshot(folder)
    assert call(config, "--resume") == 0
    assert capsys.readouterr().err == f"{folder} is finished: step {STEPS} of {STEPS}\n"
    assert snapshot(folder) == before


@pytest.mark.slow
def test_a_run_is_not_begun_over_another(
    tmp_path: Path, config: Path, reference: References, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(reference("one"), folder)
    before = snapshot(folder)
    assert call(config) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"selectron: error: run.name: {folder} already contains a run")
    assert "--resume" in line
    assert line.count("\n") == 1
    assert snapshot(folder) == before


@pytest.mark.slow
def test_a_step_without_a_checkpoint_is_refused_with_those_there_are(
    tmp_path: Path, config: Path, reference: References, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(reference("one"), folder)
    before = snapshot(folder)
    assert call(config, "--from-step", "4") == 2
    line = capsys.readouterr().err
    assert str(folder / "checkpoints" / "step_4") in line
    assert "3, 6, 9, 10" in line
    assert line.count("\n") == 1
    assert snapshot(folder) == before
