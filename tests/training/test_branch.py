"""Branches from another run's checkpoint equal runs that use their configuration from the start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import whole_run
from launching import TP2, call, curve, records, snapshot, write_config
from pool import WorkerFailed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.slow

MODEL = ["model.pattern=gated_deltanet,attention"]
SCHEDULE = ["optimizer.schedule=wsd", "training.evaluate_every=4", "training.evaluation_sequences=2", *MODEL]
TRUNK = [*SCHEDULE, "training.steps=12", "optimizer.decay_steps=2", "run.name=trunk"]
SHORT = [*SCHEDULE, "training.steps=8", "optimizer.decay_steps=2"]


@pytest.fixture(scope="module")
def trunk(pool: Any, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of 12 steps with checkpoints at 3, 6, 9 and 12, whose learning rate decays in the last two."""
    folder = tmp_path_factory.mktemp("trunk")
    pool.run(whole_run.run, 2, write_config(folder, data, folder), [*TRUNK, *TP2])
    return folder / "trunk"


@pytest.fixture(scope="module")
def direct(pool: Any, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with the configuration of the branches from the start."""
    folder = tmp_path_factory.mktemp("direct")
    pool.run(whole_run.run, 2, write_config(folder, data, folder), [*SHORT, *TP2, "run.name=direct"])
    return folder / "direct"


@pytest.mark.parametrize("layout", [[], TP2, ["optimizer.sharding=zero3"]], ids=["dp2", "tp2_sp", "zero3"])
def test_branch_equals_the_run_trained_from_scratch(
    pool: Any, data: Path, trunk: Path, direct: Path, tmp_path: Path, layout: list[str]
) -> None:
    before = snapshot(trunk)
    config = write_config(tmp_path, data, tmp_path)
    step = f"run.branch_from={trunk}/checkpoints/step_6"
    pool.run(whole_run.run, 2, config, [*SHORT, *layout, step, "run.name=branch"])
    branch = tmp_path / "branch"
    assert [line["step"] for line in records(branch)] == list(range(1, 9))
    assert [line["lr"] for line in records(branch)] == [line["lr"] for line in records(direct)]
    assert records(branch)[:6] == records(trunk)[:6]
    board = EventAccumulator(str(branch / "tensorboard")).Reload()
    assert [one.step for one in board.Scalars("train/loss")] == list(range(1, 9))
    losses = [line["loss"] for line in records(branch)]
    assert [one.value for one in board.Scalars("train/loss")] == pytest.approx(losses, rel=1e-6)
    if layout == TP2:  # same sums in the same order
        assert curve(branch) == curve(direct)
        assert records(branch, "evaluation.jsonl") == records(direct, "evaluation.jsonl")
    found, expected = ([line["loss"] for line in records(run)] for run in (branch, direct))
    assert found == pytest.approx(expected, abs=2e-6)
    assert found[7] != pytest.approx(records(trunk)[7]["loss"], abs=2e-6)  # the trunk's rate had not decayed
    assert [path.name for path in sorted((branch / "checkpoints").glob("step_*"))] == ["step_8"]
    assert snapshot(trunk) == before


def test_resumed_branch_continues_from_its_own_checkpoint(pool: Any, data: Path, trunk: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data, tmp_path)
    step = f"run.branch_from={trunk}/checkpoints/step_3"
    pool.run(whole_run.run, 2, config, [*SHORT, *TP2, step, "training.checkpoint_every=2"])
    whole = curve(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_8")
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_6\n")
    pool.run(whole_run.resume, 2, config, [*SHORT, *TP2, step, "training.checkpoint_every=2"])
    assert curve(tmp_path / "run") == whole


@pytest.mark.parametrize(
    ("step", "overrides", "message"),
    [
        (
            "step_12",
            [*SCHEDULE, "training.steps=20", "optimizer.decay_steps=2"],
            "step 11 was .*, and would have been",
        ),
        ("step_6", [*MODEL, "optimizer.schedule=cosine", "training.steps=8"], "branch off before the rate decays"),
        ("step_6", [*SHORT, "optimizer.weight_decay=0.2"], "optimizer.weight_decay: 0.2, but the checkpoint"),
        ("step_6", [*SHORT, "training.global_batch_size=2"], "training.global_batch_size: 2, but the checkpoint"),
        ("step_6", [*SHORT, "model.hidden_size=64"], "model.hidden_size: 64, but the checkpoint"),
    ],
)
def test_trunk_checkpoint_unreachable_from_scratch_is_rejected(
    pool: Any, data: Path, trunk: Path, tmp_path: Path, step: str, overrides: list[str], message: str
) -> None:
    config = write_config(tmp_path, data, tmp_path)
    with pytest.raises(WorkerFailed, match=message):
        pool.run(whole_run.run, 1, config, [*overrides, f"run.branch_from={trunk}/checkpoints/{step}"])
    assert not (tmp_path / "run").exists()


def test_invalid_checkpoint_is_rejected_before_a_process_starts(
    data: Path, trunk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, data, tmp_path)
    for given, message in (
        (trunk, f"run.branch_from: {trunk} is not a checkpoint of a run; give a checkpoint such as runs/trunk/"),
        (f"{trunk}/checkpoints/step_5", "step_5 is not a checkpoint of a run; "),
        (f"{trunk}/checkpoints/step_12", "step_12 is not before the run's end, training.steps 8; give an earlier"),
    ):
        assert call(config, *SHORT, f"run.branch_from={given}") == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
