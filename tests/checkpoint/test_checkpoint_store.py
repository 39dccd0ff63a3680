"""Checkpoint store: runs that may resume a checkpoint, and fallback when some are damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from megatron_ext.checkpoint.contents import CheckedFile
from megatron_ext.checkpoint.folder import (
    LATEST,
    RECORD,
    CheckpointFolder,
    DamagedCheckpoint,
    Progress,
    Record,
    Retention,
)
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.utils.errors import UserError

IDENTITY = {"model.hidden_size": 8, "data.train_domains": ["A", "B"], "training.seed": 1}


def store(
    root: Path, identity: dict[str, Any], check_record: Callable[[Record, Path], None] | None = None
) -> CheckpointStore:
    return CheckpointStore(root, identity, cast(Any, None), cast(Any, None), check_record=check_record)


def write(root: Path, step: int) -> Path:
    """Write a checkpoint of one file as the store does."""
    folder, content = CheckpointFolder(root), f"state of {step}".encode()
    with CheckedFile(folder.create_partial(step) / "data.bin") as file:
        file.write(content)
    fields = {"progress": Progress(step, 4 * step, 256 * step), "identity": IDENTITY, "generators": [1, 1]}
    folder.complete(step, fields, {"data.bin": file.digest}, Retention())
    return folder.path(step)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write(tmp_path, 3)
    return tmp_path


def test_the_same_run_may_continue(saved: Path) -> None:
    assert store(saved, IDENTITY).check(3).progress == Progress(3, 12, 768)


def refusing(field: str) -> Callable[[Record, Path], None]:
    """Return a function that refuses checkpoints whose identity has this field."""

    def check_record(record: Record, path: Path) -> None:
        if field in record.identity:
            raise UserError(field, f"{path} has it", "remove it")

    return check_record


def test_a_refused_record_is_an_error(saved: Path) -> None:
    with pytest.raises(UserError, match=rf"^training.seed: {saved}/step_3 has it") as raised:
        store(saved, {}, refusing("training.seed")).check(3)
    assert not isinstance(raised.value, DamagedCheckpoint)
    assert store(saved, {}, refusing("training.steps")).check(3).identity == IDENTITY


# --- choice of the checkpoint to continue from ---------------------------------------------------------------------


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    for step in (3, 6, 9):
        write(tmp_path, step)
    return tmp_path


def test_the_newest_checkpoint_is_found(three: Path) -> None:
    record, damages = store(three, IDENTITY).check_newest()
    assert (record.progress.step, damages) == (9, [])


def test_the_pointer_names_the_newest_checkpoint(three: Path) -> None:
    (three / LATEST).write_text("step_6\n")  # resumed from 3 with --from-step: 9 belongs to another history
    flip_a_bit(three / "step_6" / "data.bin")
    record, damages = store(three, IDENTITY).check_newest()
    assert record.progress.step == 3
    assert [damage.where for damage in damages] == [str(three / "step_6" / "data.bin")]


def test_damaged_checkpoints_are_skipped_and_reported(three: Path) -> None:
    flip_a_bit(three / "step_9" / "data.bin")
    (three / "step_6" / RECORD).write_text("{")
    record, damages = store(three, IDENTITY).check_newest()
    assert record.progress == Progress(3, 12, 768)
    assert [damage.where for damage in damages] == [str(three / "step_9" / "data.bin"), str(three / "step_6" / RECORD)]
    assert "has checksum" in damages[0].problem
    assert "cannot be read" in damages[1].problem


def test_a_removed_newest_checkpoint_is_skipped(three: Path) -> None:
    shutil.rmtree(three / "step_9")
    record, damages = store(three, IDENTITY).check_newest()
    assert record.progress.step == 6
    assert [damage.where for damage in damages] == [str(three / "step_9")]


def test_if_all_are_damaged_one_error_names_them(three: Path) -> None:
    for step in (3, 6, 9):
        flip_a_bit(three / f"step_{step}" / "data.bin")
    with pytest.raises(UserError, match="contains no complete checkpoint") as raised:
        store(three, IDENTITY).check_newest()
    assert not isinstance(raised.value, DamagedCheckpoint)
    assert raised.value.where == str(three)
    assert [str(three / f"step_{step}" / "data.bin") in raised.value.problem for step in (3, 6, 9)] == [True] * 3
    assert "\n" not in str(raised.value)


def test_a_refused_record_is_not_damage(three: Path) -> None:
    flip_a_bit(three / "step_9" / "data.bin")
    with pytest.raises(UserError, match=r"training\.seed: .*step_9 has it") as raised:
        store(three, IDENTITY, refusing("training.seed")).check_newest()
    assert not isinstance(raised.value, DamagedCheckpoint)


def test_a_damaged_chosen_step_is_not_replaced_by_another(three: Path) -> None:
    flip_a_bit(three / "step_6" / "data.bin")
    with pytest.raises(DamagedCheckpoint, match=r"step_6/data\.bin: has checksum .*available: 3, 9"):
        store(three, IDENTITY).check(6)
