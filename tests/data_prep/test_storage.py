"""Folders that are published completely or not at all: killed before each change, and called again."""

from pathlib import Path

import pytest
from kills import DONE, KILLED, changes

from data_prep.manifest import MANIFEST_NAME
from data_prep.storage import LOCK_NAME, SETTINGS_NAME, publish, unfinished_folder, was_published
from megatron_ext.utils.atomic_files import write_atomically
from megatron_ext.utils.errors import UserError

SETTINGS = {"--x": 1, "--names": ["a", "b"]}
OTHER = {"--x": 2, "--names": ["a", "b"]}


def content(root: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def fill(output: Path, settings: dict = SETTINGS, *, mistake: bool = False) -> None:
    """Write a folder as `prepare` does: content first, manifest last. Continue from an earlier call's files."""
    if was_published(output, settings):
        return
    with unfinished_folder(output, settings) as partial:
        if not (partial / MANIFEST_NAME).exists():
            (partial / ".work" / "notes").mkdir(exist_ok=True)
            (partial / ".work" / "notes" / "00000").touch()
            (partial / "train").mkdir(exist_ok=True)
            write_atomically(partial / "train" / "000000.tar", b"tokens")
            if mistake:
                raise UserError("--x", "is wrong", "mend it")
            write_atomically(partial / MANIFEST_NAME, b"{}")
        publish(partial, output)


@pytest.fixture
def whole(tmp_path):
    fill(tmp_path / "whole")
    assert set(content(tmp_path / "whole")) == {"train", "train/000000.tar", MANIFEST_NAME}
    return content(tmp_path / "whole")


def all_changes(tmp_path: Path, **given: object) -> range:
    (tmp_path / "count").mkdir()
    ended, number = changes(tmp_path / "count", None, lambda: fill(tmp_path / "count" / "out", **given))
    assert ended == (1 if given else DONE)
    return range(number if number >= 0 else 40)


def test_resume_after_a_kill_before_each_change(tmp_path, whole):
    numbers = all_changes(tmp_path)
    assert len(numbers) > 15
    for number in numbers:
        root = tmp_path / str(number)
        root.mkdir()
        output = root / "out"
        ended, _ = changes(root, number, lambda output=output: fill(output))
        assert ended == KILLED
        if output.exists():  # published: the content is complete, and a call with other options rejects it
            assert content(output).items() >= whole.items()
            with pytest.raises(UserError, match=r"out: already exists and is not empty; "):
                fill(output, OTHER)
        fill(output)
        assert content(root) == {"out": None, **{f"out/{name}": data for name, data in whole.items()}}
        with pytest.raises(UserError, match=r"out: already exists and is not empty; "):
            fill(output)


def test_resume_after_a_second_kill(tmp_path, whole):
    """Steps of five and seven. All pairs of positions would be a thousand."""
    for first in list(all_changes(tmp_path))[::5]:
        second, ended = 0, KILLED
        while ended == KILLED:
            root = tmp_path / f"{first}-{second}"
            root.mkdir()
            changes(root, first, lambda root=root: fill(root / "out"))
            ended, _ = changes(root, second, lambda root=root: fill(root / "out"))
            if ended == KILLED:
                fill(root / "out")
            assert content(root / "out") == whole
            second += 7


def test_kill_during_the_removal_of_a_failed_run(tmp_path, whole):
    """The record of the call's options is removed first, so no call can resume from a half-removed folder."""
    number, ended = 0, KILLED
    while ended == KILLED:
        root = tmp_path / str(number)
        root.mkdir()
        ended, _ = changes(root, number, lambda root=root: fill(root / "out", mistake=True))
        cleared = not (root / "out.partial" / SETTINGS_NAME).exists()
        if cleared:
            fill(root / "out", OTHER)
        else:
            with pytest.raises(
                UserError, match=r"out\.partial: was started with --x 1, not 2; give the same value, or "
            ):
                fill(root / "out", OTHER)
            fill(root / "out")
        assert content(root) == {"out": None, **{f"out/{name}": data for name, data in whole.items()}}
        number += 1
    assert number > 15


@pytest.mark.parametrize("left", [[LOCK_NAME], []])
def test_finished_folder_of_earlier_versions_is_kept(tmp_path, whole, left):
    """Earlier versions removed the record of options, then the lock, and renamed the folder last."""
    fill(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "out.partial")
    for name in left:
        (tmp_path / "out.partial" / name).touch()
    message = (
        r"out\.partial: (is complete, .*; rename it to out, or|exists, but was not created by .*; move it elsewhere)"
    )
    with pytest.raises(UserError, match=message):
        fill(tmp_path / "out")
    assert content(tmp_path / "out.partial").items() >= whole.items()


def test_partial_folder_of_another_program(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "precious").touch()
    (tmp_path / "file.partial").touch()
    for name in ("out", "file"):
        with pytest.raises(UserError, match=r"\.partial: exists, but was not created by `selectron prepare`; move"):
            fill(tmp_path / name)
    assert sorted(content(tmp_path)) == ["file.partial", "out.partial", "out.partial/precious"]
