"""Common state of a checkpoint: in `common.pt`, or among the tensors as megatron-core 0.19 writes it."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, save

from megatron_ext.checkpoint.common_state import SHARDED_KEY, read_common_state
from megatron_ext.checkpoint.metadata_file import read_metadata
from megatron_ext.checkpoint.metadata_index import FILE_NAME
from megatron_ext.checkpoint.pickle_names import argparse_namespace
from megatron_ext.utils.errors import UserError

STATE = {"iteration": 7, "args": Namespace(num_layers=2)}
NAMES = {("argparse", "Namespace"): argparse_namespace()}


class Harmful:
    """Class whose pickle creates a folder when loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def write(folder: Path, value: Any) -> Path:
    """Save a tensor and, as one object beside it, the common state. Return the file that contains both."""
    state = {"weight": torch.ones(3), SHARDED_KEY: [value]}
    save(state, checkpoint_id=folder, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    (path,) = folder.glob("*.distcp")
    return path


def test_state_among_the_tensors(tmp_path: Path) -> None:
    path = write(tmp_path, STATE)
    assert read_common_state(tmp_path, NAMES) == (path, STATE)
    metadata = read_metadata(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    assert read_common_state(tmp_path, NAMES, metadata) == (path, STATE)  # does not read the index again


def test_common_pt_takes_precedence(tmp_path: Path) -> None:
    write(tmp_path, {"iteration": 1})
    torch.save(STATE, tmp_path / "common.pt")
    assert read_common_state(tmp_path, NAMES) == (tmp_path / "common.pt", STATE)


def test_no_state(tmp_path: Path) -> None:
    save({"weight": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(UserError, match=r"common\.pt: cannot be read \(No such file"):
        read_common_state(tmp_path)


def test_code_among_the_tensors_is_not_run(tmp_path: Path) -> None:
    path = write(tmp_path, {"args": Namespace(evil=Harmful(tmp_path / "ran"))})
    with pytest.raises(UserError, match=rf"{path.name}: cannot be read: it .*mkdir") as error:
        read_common_state(tmp_path, NAMES)
    assert error.value.where == str(path)
    assert not (tmp_path / "ran").exists()


def test_truncated_file(tmp_path: Path) -> None:
    path = write(tmp_path, STATE)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=rf"{path.name}: cannot be read: it is truncated"):
        read_common_state(tmp_path, NAMES)
