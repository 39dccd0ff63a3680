"""The folder of checkpoints: what is whole, what is newest, and what is left by runs that did not come to an end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.folder import LATEST, RECORD, CheckpointFolder, Progress, Record
from megatron_ext.errors import UserError


def parts(step: int) -> dict[str, Any]:
    return {
        "progress": Progress(step=step, samples=4 * step, tokens=256 * step),
        "identity": {"model.hidden_size": 8},
        "generators": [1, 1],
    }


def save(folder: CheckpointFolder, step: int, keep: int = 0, content: bytes = b"state") -> Path:
    partial = folder.begin(step)
    (partial / "data.bin").write_bytes(content)
    (partial / "nested").mkdir()
    (partial / "nested" / "more.bin").write_bytes(content * 2)
    folder.finish(step, parts(step), keep)
    return folder.path(step)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "run" / "checkpoints")


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.root.iterdir())


def test_nothing_there(folder: CheckpointFolder) -> None:
    assert folder.latest() is None
    assert folder.steps() == []
    with pytest.raises(UserError, match=r"step_3/checkpoint\.json: is not there.*there is no other"):
        folder.read_record(3)


def test_a_checkpoint_is_whole_once_finished(folder: CheckpointFolder) -> None:
    partial = folder.begin(3)
    (partial / "data.bin").write_bytes(b"state")
    assert folder.steps() == []
    assert folder.latest() is None
    folder.finish(3, parts(3), keep=0)
    assert names(folder) == [LATEST, "step_3"]
    assert folder.latest() == 3
    record = folder.read_record(3)
    assert record == Record(**parts(3), files={"data.bin": 5})


def test_files_in_folders_are_recorded(folder: CheckpointFolder) -> None:
    save(folder, 3)
    assert folder.read_record(3).files == {"data.bin": 5, "nested/more.bin": 10}


def test_steps_are_in_the_order_of_numbers(folder: CheckpointFolder) -> None:
    for step in (9, 10, 100, 2):
        save(folder, step)
    assert folder.steps() == [2, 9, 10, 100]
    assert folder.latest() == 2  # what was saved last, as after --from-step


@pytest.mark.parametrize(("keep", "kept"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_the_newest_are_kept(folder: CheckpointFolder, keep: int, kept: list[int]) -> None:
    for step in (1, 2, 3, 4):
        save(folder, step, keep)
    assert folder.steps() == kept


def test_an_abandoned_checkpoint_leaves_nothing(folder: CheckpointFolder) -> None:
    save(folder, 3)
    (folder.begin(6) / "data.bin").write_bytes(b"half")
    folder.abandon(6)
    folder.abandon(6)  # every rank does
    assert names(folder) == [LATEST, "step_3"]
    assert folder.latest() == 3


def test_what_a_killed_run_left_is_replaced(folder: CheckpointFolder) -> None:
    left = folder.begin(3)
    (left / "stale.bin").write_bytes(b"from a run that was killed")
    assert folder.steps() == []
    save(folder, 3)
    assert folder.read_record(3).files.keys() == {"data.bin", "nested/more.bin"}
    assert names(folder) == [LATEST, "step_3"]


def test_a_damaged_folder_of_the_step_is_replaced(folder: CheckpointFolder) -> None:
    path = save(folder, 3)
    (path / RECORD).unlink()
    (path / "stale.bin").write_bytes(b"stale")
    save(folder, 3, content=b"new")
    assert sorted(p.name for p in path.iterdir()) == [RECORD, "data.bin", "nested"]
    assert (path / "data.bin").read_bytes() == b"new"


def _half_a_file(path: Path) -> str:
    (path / "data.bin").write_bytes(b"sta")
    return "data.bin: has 3 bytes instead of 5"


def _no_file(path: Path) -> str:
    (path / "nested" / "more.bin").unlink()
    return "nested/more.bin: is not there"


def _no_record(path: Path) -> str:
    (path / RECORD).unlink()
    return "checkpoint.json: is not there"


def _half_a_record(path: Path) -> str:
    (path / RECORD).write_bytes((path / RECORD).read_bytes()[:-40])
    return "checkpoint.json: cannot be read"


def _empty_record(path: Path) -> str:
    (path / RECORD).write_text("{}")
    return "checkpoint.json: cannot be read"


def _another_record(path: Path) -> str:
    (path / RECORD).write_text("[]")
    return "checkpoint.json: cannot be read"


def _unknown_field(path: Path) -> str:
    (path / RECORD).write_text(json.dumps({**json.loads((path / RECORD).read_text()), "colour": "red"}))
    return "checkpoint.json: cannot be read"


def _no_text(path: Path) -> str:
    (path / RECORD).write_bytes(b"\xff\xfe\x00")
    return "checkpoint.json: cannot be read"


DAMAGES = [
    _half_a_file,
    _no_file,
    _no_record,
    _half_a_record,
    _empty_record,
    _another_record,
    _unknown_field,
    _no_text,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_with_the_way_on(folder: CheckpointFolder, damage) -> None:
    for step in (3, 6, 9):
        save(folder, step)
    said = damage(folder.path(6))
    with pytest.raises(UserError) as raised:
        folder.read_record(6)
    assert f"{folder.path(6)}/{said}" in str(raised.value)
    assert "--step to generate (there are: 3, 9)" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert folder.read_record(3).progress.step == 3


@pytest.mark.parametrize("text", ["", "step_", "newest", "step_-3", "3.5"])
def test_a_pointer_to_no_step_is_an_error(folder: CheckpointFolder, text: str) -> None:
    save(folder, 3)
    (folder.root / LATEST).write_text(text)
    with pytest.raises(UserError, match=r"latest: .* names no checkpoint; .*3"):
        folder.latest()


def test_a_pointer_to_a_folder_that_is_gone_is_an_error(folder: CheckpointFolder) -> None:
    save(folder, 3)
    (folder.root / LATEST).write_text("step_6\n")
    step = folder.latest()
    assert step == 6
    with pytest.raises(UserError, match=r"step_6/checkpoint\.json: is not there.*there are: 3"):
        folder.read_record(step)


def test_a_folder_of_another_name_is_no_checkpoint(folder: CheckpointFolder) -> None:
    save(folder, 3)
    (folder.root / "step_old").mkdir()
    (folder.root / "step_old" / RECORD).write_text("{}")
    assert folder.steps() == [3]
