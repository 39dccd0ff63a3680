"""Shards that fail during training: the run stops once, and its next start skips or verifies them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import whole_run
from launching import call, records, snapshot, write_config
from pool import WorkerFailed

from data_prep import manifest as manifest_module
from megatron_ext.data.failed import read_failed

pytestmark = pytest.mark.slow

SHARD = "train/First/000000.tar"
SKIP = "data.on_damaged=skip"
AT_ONCE = "training.async_checkpoints=false"
LONGER = ["training.steps=12", "--resume"]


@pytest.fixture
def config(tmp_path: Path, own_data: Path) -> Path:
    """Configuration of a run whose learning rate does not depend on its length, which these tests extend."""
    path = write_config(tmp_path, own_data, tmp_path)
    text = path.read_text().replace("optimizer: {", "optimizer: {schedule: constant, ")
    text = text.replace('"top1_chunk,gated_deltanet,attention,top1_element"', "attention")
    path.write_text(text.replace("evaluation_sequences: 3", "evaluation_sequences: 2"))
    return path


class Disk:
    """Fake disk that fails for one file after some steps, until mended. Size and times of the file do not change."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self._run = path, folder
        self.is_mended, self._is_broken = False, False
        self._pread, self._sha256_of = os.pread, manifest_module.sha256_of

    def pread(self, descriptor: int, length: int, offset: int) -> bytes:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == self.path:
            self._is_broken |= len(records(self._run)) >= 4
            self._fail()
        return self._pread(descriptor, length, offset)

    def sha256_of(self, path: Path) -> str:
        if path == self.path:
            self._fail()
        return self._sha256_of(path)

    def _fail(self) -> None:
        if self._is_broken and not self.is_mended:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def disk(tmp_path: Path, own_data: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(own_data / SHARD, tmp_path / "run")
    monkeypatch.setattr(os, "pread", disk.pread)
    monkeypatch.setattr(manifest_module, "sha256_of", disk.sha256_of)
    return disk


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def printed(capsys: pytest.CaptureFixture[str], start: str) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"selectron: {start}: ")]


def skipped(folder: Path) -> list[tuple[int, list[str]]]:
    return [
        (line["step"], [one["shard"] for one in line["shards"]]) for line in records(folder, "skipped_shards.jsonl")
    ]


def test_shard_on_a_failing_disk_is_skipped_by_the_next_start(
    tmp_path: Path, config: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert call(config, SKIP, AT_ONCE) == 2
    (error,) = printed(capsys, "error")
    assert f"{disk.path}: cannot be read (Input/output error); " in error
    assert error.endswith("start again with --resume=auto: a shard that is still damaged is skipped")
    assert read_failed(folder) == {SHARD}
    assert skipped(folder) == []
    assert call(config, SKIP, "--resume") == 0
    assert f"{disk.path} or its index cannot be read (Input/output error): skipped" in printed(capsys, "warning")[0]
    assert [line["step"] for line in records(folder)] == list(range(1, 11))
    assert skipped(folder) == [(3, [SHARD])]
    disk.is_mended = True  # the next start reads it without error
    assert call(config, SKIP, *LONGER) == 0
    assert printed(capsys, "warning") == []
    assert skipped(folder) == [(3, [SHARD]), (10, [])]
    assert read_failed(folder) == set()


def test_shard_on_a_failing_disk_is_named_without_skipping(
    tmp_path: Path, config: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(config, AT_ONCE) == 2
    (error,) = printed(capsys, "error")
    assert error.endswith(
        f"{disk.path}: cannot be read (Input/output error); copy it again or prepare the data again, then start again "
        "with --resume=auto, or skip the shard with --resume=auto data.on_damaged=skip"
    )
    before = snapshot(tmp_path)
    for _ in range(2):
        assert call(config, "--resume") == 2
        (error,) = printed(capsys, "error")
        assert f"{disk.path}: or its index cannot be read (Input/output error); copy it again" in error
        assert snapshot(tmp_path) == before
    disk.is_mended = True
    assert call(config, "--resume") == 0
    assert read_failed(tmp_path / "run") == set()


@pytest.fixture
def remote(tmp_path: Path, own_data: Path) -> list[str]:
    """Same data at an address, with a damaged shard of the right size."""
    flip_a_byte(own_data / SHARD)
    return [f"data.path=file://{own_data}", f"data.cache_dir={tmp_path / 'cache'}"]


def test_damaged_shard_is_skipped_by_the_next_start(
    tmp_path: Path, own_data: Path, config: Path, remote: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert call(config, SKIP, *remote) == 2
    (error,) = printed(capsys, "error")
    assert f"file://{own_data / SHARD}: sha256 differs: " in error
    assert error.endswith("a shard that is still damaged is skipped")
    for steps, arguments in ((10, ["--resume=auto"]), (12, LONGER)):  # remembered while the damage persists
        assert call(config, SKIP, *remote, *arguments) == 0
        assert f"file://{own_data / SHARD} sha256 differs: " in printed(capsys, "warning")[0]
        assert len(records(folder)) == steps
        assert [shards for _, shards in skipped(folder)] == [[SHARD]]
    flip_a_byte(own_data / SHARD)
    assert call(config, SKIP, *remote, "training.steps=13", "--resume") == 0
    assert printed(capsys, "warning") == []
    assert read_failed(folder) == set()


def test_damaged_shard_is_named_without_skipping(
    tmp_path: Path, own_data: Path, config: Path, remote: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(config, *remote) == 2
    assert "--resume=auto data.on_damaged=skip" in printed(capsys, "error")[0]
    for _ in range(2):
        assert call(config, *remote, "--resume=auto") == 2
        (error,) = printed(capsys, "error")
        assert f"file://{own_data / SHARD}: sha256 differs: " in error
    flip_a_byte(own_data / SHARD)
    assert call(config, *remote, "--resume=auto") == 0
    assert len(records(tmp_path / "run")) == 10
    assert read_failed(tmp_path / "run") == set()


def test_damage_found_by_any_rank_is_recorded_for_the_next_start(
    pool: Any, tmp_path: Path, config: Path, remote: list[str]
) -> None:
    with pytest.raises(WorkerFailed, match="sha256 differs"):
        pool.run(whole_run.run, 2, config, [SKIP, *remote])
    assert read_failed(tmp_path / "run") == {SHARD}
    errors = pool.run(whole_run.resume, 2, config, [SKIP, *remote], "auto")
    assert "".join(errors).count("sha256 differs") == 1
    assert len(records(tmp_path / "run")) == 10
