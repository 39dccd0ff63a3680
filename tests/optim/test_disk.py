"""Requirements of offloading to a disk, checked before DeepSpeed starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.optim import disk
from megatron_ext.utils.errors import UserError


@pytest.fixture(autouse=True)
def _operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.AsyncIOBuilder, "is_compatible", lambda self, verbose: True)


def check(section: str, **fields: Any) -> None:
    disk.check_disk({section: {"device": "nvme", **fields}}, torch.nn.Linear(7, 3), data_parallel_size=2)


@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
def test_offload_folder_is_created(tmp_path: Path, section: str) -> None:
    check(section, nvme_path=str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
def test_folder_that_cannot_be_created(tmp_path: Path, section: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be created") as raised:
        check(section, nvme_path=str(tmp_path / "file" / "b"))
    assert raised.value.where == f"zero_optimization.{section}.nvme_path"


def test_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(UserError, match="cannot be written to"):
        check("offload_param", nvme_path=str(tmp_path))


def test_buffer_holds_shard_of_largest_parameter(tmp_path: Path) -> None:
    check("offload_param", nvme_path=str(tmp_path), buffer_size=11)
    with pytest.raises(UserError, match=r"10 is less than the 11 elements .* of weight; set it to 11") as raised:
        check("offload_param", nvme_path=str(tmp_path), buffer_size=10)
    assert raised.value.where == "zero_optimization.offload_param.buffer_size"
    check("offload_optimizer", nvme_path=str(tmp_path))  # this section has no buffer size


def test_missing_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.AsyncIOBuilder, "is_compatible", lambda self, verbose: False)
    with pytest.raises(UserError, match="libaio"):
        check("offload_optimizer", nvme_path=str(tmp_path))
    disk.check_disk({}, torch.nn.Linear(7, 3), data_parallel_size=2)
