"""Folder of checkpoints: complete checkpoints, the newest one, and leftovers of interrupted runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.contents import FileDigest, compute_digest
from megatron_ext.checkpoint.disk import NotAsWritten
from megatron_ext.checkpoint.folder import (
    LATEST,
    RECORD,
    CheckpointFolder,
    DamagedCheckpoint,
    Progress,
    Record,
    Retention,
)
from megatron_ext.utils.errors import UserError

KEEP_ALL = Retention()


def record_fields(step: int) -> dict[str, Any]:
    return {
        "progress": Progress(step=step, samples=4 * step, tokens=256 * step),
        "identity": {"model.hidden_size": 8},
        "generators": [1, 1],
    }


def complete(folder: CheckpointFolder, step: int, retention: Retention = KEEP_ALL) -> None:
    partial = folder.partial(step)
    written = {str(path.relative_to(partial)): compute_digest(path) for path in partial.rglob("*") if path.is_file()}
    folder.complete(step, record_fields(step), written, retention)


def save(folder: CheckpointFolder, step: int, retention: Retention = KEEP_ALL, content: bytes = b"state") -> Path:
    partial = folder.create_partial(step)
    (partial / "data.bin").write_bytes(content)
    (partial / "nested").mkdir()
    (partial / "nested" / "more.bin").write_bytes(content * 2)
    complete(folder, step, retention)
    return folder.path(step)


def read(folder: CheckpointFolder, step: int) -> Record:
    """Read the record of a checkpoint, verifying all its files."""
    record = folder.read_record(step)
    for name, content in record.files.items():
        folder.check_file(step, name, content)
    return record


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "run" / "checkpoints")


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.root.iterdir())


def test_an_empty_folder_has_no_checkpoints(folder: CheckpointFolder) -> None:
    assert folder.latest() is None
    assert folder.steps() == []
    with pytest.raises(UserError, match="step_3: does not exist; restore it from a backup, or train the run"):
        folder.read_record(3)


def test_a_checkpoint_exists_once_it_is_complete(folder: CheckpointFolder) -> None:
    partial = folder.create_partial(3)
    (partial / "data.bin").write_bytes(b"state")
    assert folder.steps() == []
    assert folder.latest() is None
    complete(folder, 3)
    assert names(folder) == [LATEST, "step_3"]
    assert folder.latest() == 3
    assert read(folder, 3) == Record(
        **record_fields(3), files={"data.bin": FileDigest(5, "ccb356a16ce4d54a899465fe1ae32812")}
    )


def test_files_in_folders_are_recorded(folder: CheckpointFolder) -> None:
    save(folder, 3)
    sizes = {name: content.size for name, content in read(folder, 3).files.items()}
    assert sizes == {"data.bin": 5, "nested/more.bin": 10}


def test_steps_are_in_numerical_order(folder: CheckpointFolder) -> None:
    for step in (9, 10, 100, 2):
        save(folder, step)
    assert folder.steps() == [2, 9, 10, 100]
    assert folder.latest() == 2  # the last save, not the highest step, as after --from-step


@pytest.mark.parametrize(
    ("newest", "every", "steps"),
    [
        (0, 0, [1, 2, 3, 4, 5]),
        (1, 0, [5]),
        (2, 0, [4, 5]),
        (9, 0, [1, 2, 3, 4, 5]),
        (1, 2, [2, 4, 5]),
        (2, 2, [2, 4, 5]),
        (2, 3, [3, 4, 5]),
        (0, 2, [1, 2, 3, 4, 5]),
    ],
)
def test_retention_keeps_the_newest_and_every_nth_step(
    folder: CheckpointFolder, newest: int, every: int, steps: list[int]
) -> None:
    for step in (1, 2, 3, 4, 5):
        save(folder, step, Retention(newest, every))
    assert folder.steps() == steps
    assert names(folder) == [LATEST, *(f"step_{step}" for step in steps)]


def test_a_new_checkpoint_is_kept_if_later_steps_exist(folder: CheckpointFolder) -> None:
    for step in (3, 6, 9):
        save(folder, step)
    save(folder, 4, Retention(newest=1))  # resumed from 3
    assert folder.steps() == [4, 6, 9]
    assert folder.latest() == 4
    save(folder, 6, Retention(newest=1))
    assert folder.steps() == [6, 9]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "data.bin").write_bytes(b"sta"), "data.bin has 3 bytes on the disk, and 5 were written"),
        (lambda path: (path / "data.bin").unlink(), "data.bin has no bytes on the disk, and 5 were written"),
        (lambda path: (path / "else.bin").write_bytes(b"a"), "else.bin has 1 bytes on the disk, and None were written"),
    ],
)
def test_a_checkpoint_with_wrong_files_is_not_completed(folder: CheckpointFolder, change, message: str) -> None:
    save(folder, 3)
    partial = folder.create_partial(6)
    (partial / "data.bin").write_bytes(b"state")
    written = {"data.bin": compute_digest(partial / "data.bin")}
    change(partial)
    with pytest.raises(NotAsWritten, match=message):
        folder.complete(6, record_fields(6), written, KEEP_ALL)
    assert folder.steps() == [3]
    assert folder.latest() == 3


def test_an_abandoned_checkpoint_leaves_nothing(folder: CheckpointFolder) -> None:
    save(folder, 3)
    (folder.create_partial(6) / "data.bin").write_bytes(b"half")
    folder.abandon(6)
    folder.abandon(6)  # every rank calls this
    assert names(folder) == [LATEST, "step_3"]
    assert folder.latest() == 3


def test_leftovers_of_a_killed_run_are_replaced(folder: CheckpointFolder) -> None:
    partial = folder.create_partial(3)
    (partial / "stale.bin").write_bytes(b"from a run that was killed")
    assert folder.steps() == []
    save(folder, 3)
    assert read(folder, 3).files.keys() == {"data.bin", "nested/more.bin"}
    assert names(folder) == [LATEST, "step_3"]


def test_leftovers_of_other_steps_are_removed(folder: CheckpointFolder) -> None:
    (folder.create_partial(6) / "data.bin").write_bytes(b"half")
    (folder.root / ".step_1.dropped").mkdir()
    save(folder, 3)
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


def _another_bit(path: Path) -> str:
    (path / "data.bin").write_bytes(b"statd")  # same size
    return "data.bin: has checksum "


def _no_file(path: Path) -> str:
    (path / "nested" / "more.bin").unlink()
    return "nested/more.bin: is missing"


def _no_record(path: Path) -> str:
    (path / RECORD).unlink()
    return "checkpoint.json: is missing"


def _half_a_record(path: Path) -> str:
    (path / RECORD).write_bytes((path / RECORD).read_bytes()[:-40])
    return "checkpoint.json: cannot be read"


def _empty_record(path: Path) -> str:
    (path / RECORD).write_text("{}")
    return "checkpoint.json: cannot be read"


def _another_record(path: Path) -> str:
    (path / RECORD).write_text("[]")
    return "checkpoint.json: cannot be read"


def _plain_sizes(path: Path) -> str:
    raw = json.loads((path / RECORD).read_text())
    (path / RECORD).write_text(json.dumps({**raw, "files": {"data.bin": 5}}))
    return "checkpoint.json: cannot be read"


def _listed_identity(path: Path) -> str:
    (path / RECORD).write_text(json.dumps({**json.loads((path / RECORD).read_text()), "identity": []}))
    return "checkpoint.json: cannot be read"


def _unknown_field(path: Path) -> str:
    (path / RECORD).write_text(json.dumps({**json.loads((path / RECORD).read_text()), "colour": "red"}))
    return "checkpoint.json: cannot be read"


def _no_text(path: Path) -> str:
    (path / RECORD).write_bytes(b"\xff\xfe\x00")
    return "checkpoint.json: cannot be read"


DAMAGES = [
    _half_a_file,
    _another_bit,
    _no_file,
    _no_record,
    _half_a_record,
    _empty_record,
    _another_record,
    _plain_sizes,
    _listed_identity,
    _unknown_field,
    _no_text,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_error_names_the_damaged_file_and_the_other_checkpoints(folder: CheckpointFolder, damage) -> None:
    for step in (3, 6, 9):
        save(folder, step)
    message = damage(folder.path(6))
    with pytest.raises(DamagedCheckpoint) as raised:
        read(folder, 6)
    assert f"{folder.path(6)}/{message}" in str(raised.value)
    assert "choose another step with --from-step (available: 3, 9)" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert read(folder, 3).progress.step == 3


@pytest.mark.parametrize("text", ["", "step_", "newest", "step_-3", "3.5"])
def test_a_pointer_to_no_step_is_an_error(folder: CheckpointFolder, text: str) -> None:
    save(folder, 3)
    (folder.root / LATEST).write_text(text)
    with pytest.raises(UserError, match=r"latest: .* is not a checkpoint; .*3"):
        folder.latest()


def test_a_pointer_to_a_removed_folder_is_an_error(folder: CheckpointFolder) -> None:
    save(folder, 3)
    (folder.root / LATEST).write_text("step_6\n")
    step = folder.latest()
    assert step == 6
    with pytest.raises(UserError, match=r"step_6: does not exist; .*available: 3"):
        folder.read_record(step)


def test_a_folder_of_another_name_is_no_checkpoint(folder: CheckpointFolder) -> None:
    save(folder, 3)
    (folder.root / "step_old").mkdir()
    (folder.root / "step_old" / RECORD).write_text("{}")
    assert folder.steps() == [3]


@pytest.mark.parametrize(
    "change",
    [
        {"progress": {"step": "1", "samples": 4, "tokens": 256}},
        {"progress": {"step": 1, "samples": -4, "tokens": 256}},
        {"progress": {"step": 10**400, "samples": 4, "tokens": 256}},
        {"progress": {"step": 1, "samples": 4, "tokens": float("inf")}},
        {"identity": ["model.hidden_size"]},
        {"generators": "x"},
        {"files": {"data.bin": {"size": "5", "xxh3_128": "00"}}},
    ],
    ids=["text", "negative", "huge", "infinite", "identity", "generators", "files"],
)
def test_a_record_of_other_types_is_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = CheckpointFolder(tmp_path)
    record = save(folder, 1) / RECORD
    record.write_text(json.dumps(json.loads(record.read_bytes()) | change))
    with pytest.raises(DamagedCheckpoint, match="cannot be read as a checkpoint's record"):
        folder.read_record(1)


def test_an_endless_pointer_file_is_refused(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    (tmp_path / LATEST).unlink()
    (tmp_path / LATEST).symlink_to("/dev/zero")
    with pytest.raises(UserError, match="cannot be read"):
        folder.latest()
