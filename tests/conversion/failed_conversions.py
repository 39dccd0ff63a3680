"""Damage to a converted model, and the error line of a conversion that must fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Convert = Callable[..., int]


def error(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("selectron: error: ")
    return line.removeprefix("selectron: error: ")


def refused(convert: Convert, capsys: pytest.CaptureFixture[str], source: Path, folder: Path, *more: str) -> str:
    """Return the one error line of a conversion that must fail and leave nothing."""
    before = sorted(folder.iterdir())
    capsys.readouterr()
    assert convert(source, folder / "out", "--to", "megatron", *more) == 2
    assert sorted(folder.iterdir()) == before
    return error(capsys)


def edited(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def no_shard(folder: Path) -> str:
    (folder / "model-00002-of-00002.safetensors").unlink()
    return "model-00002-of-00002.safetensors: is missing, but model.safetensors.index.json names it; "
