"""Command `selectron train --trial`: a short run in a separate folder, and its estimates for the whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import call, records, snapshot, write_config

from megatron_ext.config.schema import DataConfig, RunConfig, RunSection, TrainingConfig
from megatron_ext.training.trial import MARKER, prepare_folder, write_estimate

FIELDS = ["model.pattern=attention", "training.evaluate_every=2"]


def _whole(folder: Path, **training: Any) -> RunConfig:
    return RunConfig(
        data=DataConfig(path="none", seq_length=10),
        training=TrainingConfig(steps=1000, global_batch_size=4, **training),
        run=RunSection(dir=str(folder)),
    )


def _finished(folder: Path, seconds: list[float], work: float | None = None) -> Path:
    """A trial's folder after steps of so many seconds, each worth so many at the peak; its checkpoints."""
    prepare_folder(folder)
    lines = [
        {"loss": 5.0 - step, "tokens_per_second": 40 / each, "peak_memory": 100 + step, "mfu": work and work / each}
        for step, each in enumerate(seconds)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoints = folder / "checkpoints"
    (checkpoints / "step_4").mkdir(parents=True)
    (checkpoints / "step_4" / "state").write_bytes(b"x" * 1000)
    return checkpoints


def test_the_estimate_of_the_whole_run(tmp_path: Path) -> None:
    folder = tmp_path / "trials" / "run"
    checkpoints = _finished(folder, [60.0, 9.0, 2.0, 3.0, 2.5], work=1.0)
    whole = _whole(tmp_path, evaluate_every=300, checkpoint_every=500)
    text = write_estimate(whole, folder, checkpoints, {"evaluation": [7.0], "save": [1.5], "write": [0.5]})
    found = json.loads((folder / MARKER).read_text())
    assert found["step_seconds"] == 2.5  # median of the steps after the first two
    assert found["first_step_seconds"] == 60.0
    assert found["tokens_per_second"] == 16.0
    assert found["mfu"] == pytest.approx(0.4)
    assert found["peak_memory"] == 104
    assert found["checkpoint_bytes"] == 1000
    assert (found["checkpoint_seconds"], found["checkpoint_waits"]) == (2.0, 1.5)
    # Evaluations after 300, 600, 900 and 1000 steps, checkpoints after 500 and 1000.
    assert found["whole_seconds"] == pytest.approx(1000 * 2.5 + 4 * 7.0 + 2 * 1.5)
    assert found["whole_tokens"] == 1000 * 4 * 10
    assert found["losses"] == [5.0, 4.0, 3.0, 2.0, 1.0]
    assert not checkpoints.exists()
    assert "1,000 steps, 40,000 tokens: about 42.2 min" in text


def test_a_trial_of_one_step_without_evaluations(tmp_path: Path) -> None:
    folder = tmp_path / "trials" / "run"
    text = write_estimate(_whole(tmp_path), folder, _finished(folder, [2.0]), {"save": [1.0], "write": [0.0]})
    found = json.loads((folder / MARKER).read_text())
    assert (found["step_seconds"], found["evaluation_seconds"], found["mfu"]) == (2.0, None, None)
    assert found["whole_seconds"] == pytest.approx(2001.0)
    assert "evaluation" not in text


def test_trial_does_not_change_the_run(tmp_path: Path, data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, data, tmp_path / "runs")
    assert call(config, *FIELDS, "--trial", "3") == 0
    trials = tmp_path / "runs" / "trials"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["trials"]
    assert [one["step"] for one in records(trials / "run")] == [1, 2, 3]
    assert {one["step"] for one in records(trials / "run", "evaluation.jsonl")} == {3}
    text = capfd.readouterr().out
    assert text.startswith("trial finished\n  step ")
    assert f"  kept in      {trials / 'run'}\n" in text
    # Another trial replaces the first; neither touches the run.
    (tmp_path / "runs" / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "metrics.jsonl").write_text("{}\n")
    before = snapshot(tmp_path / "runs" / "run")
    assert call(config, *FIELDS, "training.steps=4", "--trial") == 2
    assert "--trial: 5 steps, but the run has training.steps 4; give 1 to 4" in capfd.readouterr().err
    assert call(config, *FIELDS, "--trial=1") == 0
    assert [one["step"] for one in records(trials / "run")] == [1]
    assert snapshot(tmp_path / "runs" / "run") == before


def test_trial_does_not_replace_a_run(tmp_path: Path, data: Path, capfd: Any) -> None:
    config = write_config(tmp_path, data, tmp_path / "runs")
    run = tmp_path / "runs" / "trials" / "run"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    assert call(config, *FIELDS, "--trial") == 2
    assert "already contains a run" in capfd.readouterr().err
    assert (run / "metrics.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("option", ["--resume", "--from-step=2"])
def test_trial_is_not_resumed(tmp_path: Path, data: Path, capfd: Any, option: str) -> None:
    assert call(write_config(tmp_path, data, tmp_path), "--trial", option) == 2
    assert "--trial: a trial starts from initial weights; omit --resume and --from-step" in capfd.readouterr().err
