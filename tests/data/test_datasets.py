"""Opening a run's data: from a folder, from a URL, with weights, with a damaged shard."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from corpora import prepared

from megatron_ext.config.schema import DataConfig
from megatron_ext.data.datasets import RunData, open_data
from megatron_ext.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("prepared"))


def opened(path: Path | str, **fields: Any) -> RunData:
    return open_data(DataConfig(path=str(path), seq_length=32, **fields), seed=3)


def same(one: RunData, other: RunData) -> bool:
    return all(np.array_equal(one.samples[index], other.samples[index]) for index in range(2 * one.samples.num_windows))


def test_url_gives_the_samples_of_the_folder(folder: Path, tmp_path: Path) -> None:
    local, remote = opened(folder), opened(f"file://{folder}", cache_dir=str(tmp_path))
    assert remote.root.parent == tmp_path
    splits = {path.relative_to(remote.root).parts[0] for path in remote.root.rglob("*.npy")}
    assert splits == {"validation", "test"}  # evaluation data is downloaded at the start
    assert remote.tokenizer_file.read_bytes() == local.tokenizer_file.read_bytes()
    assert same(local, remote)


def test_verified_files_are_not_read_again(folder: Path) -> None:
    first = opened(folder)
    assert (first.num_unchanged, len(first.verified) % 2) == (0, 0)
    config = DataConfig(path=str(folder), seq_length=32)
    assert open_data(config, 3, first.verified).num_unchanged == len(first.verified) > 0
    assert open_data(replace(config, verify="sha256_always"), 3, first.verified).num_unchanged == 0
    assert open_data(replace(config, verify="size"), 3, first.verified).verified == {}


@pytest.mark.parametrize("cached", [False, True])
def test_a_damaged_shard(folder: Path, tmp_path: Path, cached: bool) -> None:
    whole = opened(folder)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    shard = copy / "train/First/000001.tar"
    shard.unlink()
    path, fields = (f"file://{copy}", {"cache_dir": str(tmp_path / "cache")}) if cached else (str(copy), {})
    with pytest.raises(UserError, match=r"copy/train/First/000001\.tar: is missing; "):
        opened(path, **fields)
    without = opened(path, on_damaged="skip", **fields)
    assert [damage.shard for damage in without.damages] == ["train/First/000001.tar"]
    assert 0 < without.samples.lost_windows < whole.samples.num_windows / 2
    assert not same(whole, without)
    (copy / "test/Other/000000.tar").unlink()
    if cached:
        opened(path, on_damaged="skip", **fields)  # make a local copy first
        fields = {"cache_dir": str(tmp_path / "another")}
    with pytest.raises(UserError, match=r"test/Other/000000\.tar: (is missing|cannot be read)"):
        opened(path, on_damaged="skip", **fields)


@pytest.mark.parametrize("verify", ["sha256", "size"])
def test_failed_shard_is_verified_in_full(folder: Path, tmp_path: Path, verify: Literal["sha256", "size"]) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    shard = "train/First/000001.tar"
    config = DataConfig(path=str(copy), seq_length=32, verify=verify, on_damaged="skip")
    whole = open_data(config, 3)
    stat = (copy / shard).stat()
    (copy / shard).write_bytes(bytes(stat.st_size))
    known = dict(whole.verified)
    if known:  # as if the disk returned different bytes: the recorded file times match
        changed = (copy / shard).stat()
        known[str(copy / shard)][3:] = [changed.st_mtime_ns, changed.st_ctime_ns]
    assert open_data(config, 3, known).damages == []
    (damage,) = open_data(config, 3, known, [shard]).damages
    assert (damage.shard, "sha256 differs" in damage.problem) == (shard, True)
    with pytest.raises(UserError, match=rf"{shard}: sha256 differs"):
        open_data(replace(config, on_damaged="stop"), 3, known, [shard])
    shutil.copy(folder / shard, copy / shard)
    again = open_data(config, 3, known, [shard])
    assert again.damages == []
    assert again.verified.keys() == whole.verified.keys()


def test_cache_smaller_than_the_training_data(folder: Path, tmp_path: Path) -> None:
    fields = {"path": f"file://{folder}", "cache_dir": str(tmp_path)}
    assert opened(**fields, cache_gib=1).warnings == []
    data = opened(**fields, cache_gib=1e-6)
    (warning,) = data.warnings
    assert warning.startswith("selectron: warning: data.cache_gib: 9.99e-07 GiB, but the training shards take ")
    assert same(data, opened(folder))
    open_files = {os.path.realpath(f"/proc/self/fd/{descriptor}") for descriptor in os.listdir("/proc/self/fd")}
    removed = [path for path in open_files if path.startswith(str(tmp_path)) and path.endswith(".tar (deleted)")]
    assert len(removed) <= 1  # an unlinked file occupies disk space until it is closed


def test_weights(folder: Path) -> None:
    data = opened(folder, weights={"Second": 1, "First": 3})
    assert data.weights == {"First": 3, "Second": 1}
    assert not same(data, opened(folder))
    with pytest.raises(
        UserError, match=r"^data.weights: no domain Third in the train split; choose from: First, Second$"
    ):
        opened(folder, weights={"Third": 1})
