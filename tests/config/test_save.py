from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from config_fakes import EXAMPLES, MIXERS, config_of, load
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.config.load import load_config
from megatron_ext.config.save import save_config, to_yaml
from megatron_ext.config.schema import OptimizerConfig, RunSection
from megatron_ext.config.validate import validate
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.printable import control_characters


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_round_trip_of_the_examples(example: Path, tmp_path: Path) -> None:
    config = load_config(example, [], MIXERS)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml", [], MIXERS) == config


@settings(max_examples=25, deadline=None)
@given(
    lr=st.floats(min_value=1e-300, max_value=1e300),
    path=st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).filter(
        lambda path: not control_characters(path)
    ),
    domains=st.none() | st.lists(st.sampled_from(["yes", "null", "1", "1e-3", "2026-01-31", "a: b", "#", " x ", ""])),
)
def test_round_trip_of_values(
    tmp_path_factory: pytest.TempPathFactory, lr: float, path: str, domains: list[str] | None
) -> None:
    config = config_of(data={"path": path, "train_domains": domains}, optimizer={"lr": lr, "min_lr": lr / 10})
    assert load(to_yaml(config), tmp_path_factory.mktemp("trip")) == config


def test_saved_keys_have_schema_order() -> None:
    text = to_yaml(config_of(data={"train_domains": ["B", "A"]}))
    sections = [line.rstrip(":") for line in text.splitlines() if line and line[0] != " "]
    assert sections == [
        "data",
        "model",
        "mixers",
        "parallel",
        "training",
        "optimizer",
        "resilience",
        "logging",
        "run",
        "retrieval: {}",
        "fewshot: {}",
    ]
    assert "  train_domains: [B, A]\n" in text
    assert "  betas: [0.9, 0.95]\n" in text
    assert "  epsilon: 1.0e-08\n" in text


def test_failed_save_keeps_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    config = config_of()
    save_config(config, path)
    before = path.read_text()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        save_config(replace(config, run=RunSection(name="other")), path)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_infinity_is_rejected() -> None:
    with pytest.raises(UserError, match="finite"):
        validate(OptimizerConfig, {"lr": float("inf")})
