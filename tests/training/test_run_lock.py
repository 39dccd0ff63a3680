"""Run folders locked by another process: refused at start, and training ends if the lock is lost."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from corpora import prepared
from launching import call, records, snapshot, write_config

from megatron_ext.run_folder import lock as lock_module
from megatron_ext.run_folder.lock import FOLDER, acquire
from megatron_ext.run_folder.lock_file import lock_state
from megatron_ext.run_folder.process_identity import this_process
from megatron_ext.training.records import RunRecords
from megatron_ext.training.run_lock import WRITTEN_PATHS, hold_run_lock
from megatron_ext.utils.errors import UserError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def config(tmp_path: Path, data: Path) -> Path:
    return write_config(tmp_path, data, tmp_path)


def test_the_first_rank_holds_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with hold_run_lock(tmp_path / "run") as lock:
        assert lock is None
        assert not (tmp_path / "run").exists()
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    with hold_run_lock(tmp_path / "run") as lock:
        assert lock is not None
        assert lock_state(tmp_path / "run" / FOLDER).is_held  # type: ignore[union-attr]
    assert not lock_state(tmp_path / "run" / FOLDER).is_held  # type: ignore[union-attr]


@pytest.mark.parametrize("name", WRITTEN_PATHS)
def test_run_folder_with_a_link_out_of_it_is_rejected(tmp_path: Path, name: str) -> None:
    """A stranger's run folder may contain such a link. Files at its target would be replaced and removed."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.mkdir()
    (outside / "1").write_text("a letter")
    (run / name).symlink_to(outside)
    with pytest.raises(UserError, match="where a link leads out of"), hold_run_lock(run):
        pass
    assert [path.name for path in outside.iterdir()] == ["1"]


@pytest.mark.parametrize("resume", [[], ["--resume=auto"]], ids=["begun", "resumed"])
def test_second_process_is_rejected(
    config: Path, tmp_path: Path, resume: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    acquire(tmp_path / "run" / FOLDER, "run")
    before = snapshot(tmp_path / "run")
    assert call(config, *resume) == 2
    me = this_process()
    message = f"selectron: error: {tmp_path}/run: is held by process {me.pid} on {me.host}, since "
    assert message in capsys.readouterr().err
    assert snapshot(tmp_path / "run") == before


def test_run_that_lost_its_lock_exits_and_writes_nothing(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm requeued the job on another node while this start was cut off."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(lock_module, "_CHECK_SECONDS", 0.0)
    again, step, found = dataclasses.replace(this_process(), restarts=1), RunRecords.step, dict[str, Any]()

    def step_and_lose(self: RunRecords, metrics: dict[str, Any]) -> None:
        step(self, metrics)
        if metrics["step"] == 4:  # after the checkpoint of step 3
            acquire(tmp_path / "run" / FOLDER, "run", process=again)
            found.update(snapshot(tmp_path / "run"))

    with patch.object(RunRecords, "step", step_and_lose):
        assert call(config) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/run: was taken over by {again}, since" in error
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3, 4]
    left = snapshot(tmp_path / "run")
    assert {name for name in left if left[name] != found.get(name)} <= {
        name for name in left if "tensorboard" in name or "heartbeats" in name
    }
    assert lock_state(tmp_path / "run" / FOLDER).holder.process == again  # type: ignore[union-attr]


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_pending_checkpoint_is_not_published_after_the_lock_is_lost(
    config: Path, tmp_path: Path, asynchronous: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_ext.checkpoint.saving import AsyncSave

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(lock_module, "_CHECK_SECONDS", 1e9)  # so that only the checkpoint checks the lock
    again, write = dataclasses.replace(this_process(), restarts=1), AsyncSave._write

    def write_and_lose(self: AsyncSave) -> bytes:
        written = write(self)
        if self.step == 6:
            acquire(tmp_path / "run" / FOLDER, "run", process=again)
        return written

    with patch.object(AsyncSave, "_write", write_and_lose):
        assert call(config, f"training.async_checkpoints={asynchronous}") == 2
    assert "cannot be saved" in (error := capsys.readouterr().err) or "was taken over" in error
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.glob("*step_*")) == ["step_3"]
    assert (checkpoints / "latest").read_text() == "step_3\n"
    sign = json.loads((tmp_path / "run" / "heartbeats" / "rank_0").read_text())
    assert sign["start"] not in ("", lock_state(tmp_path / "run" / FOLDER).holder.token)  # type: ignore[union-attr]
