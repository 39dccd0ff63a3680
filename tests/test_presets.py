"""Example presets: every mixer at the study's two sizes has the parameter count of the Transformer++."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.spec_utils import build_module

from megatron_ext.config.load import load_config
from megatron_ext.config.rules import check
from megatron_ext.config.schema import RunConfig
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.model.build import transformer_config
from megatron_ext.model.shape import model_shape
from megatron_ext.model.specs import mixer_spec
from megatron_ext.platform.device import Platform

EXAMPLES = Path(__file__).parents[1] / "examples"
SIZES = {"110m": "110m_2k.yaml", "1p3b": "1p3b_100k.yaml"}
PRESETS = [(size, name) for size in SIZES for name in sorted(load_all())]


def _load(size: str, name: str, *overrides: str) -> RunConfig:
    return load_config(
        EXAMPLES / SIZES[size], [str(EXAMPLES / "mixers" / size / f"{name}.yaml"), *overrides], load_all()
    )


def _parameters(config: RunConfig, groups: Any) -> int:
    """Number of parameters of all layers, with a real mixer. Embeddings are equal for all models and excluded."""
    cpu = Platform(torch.device("cpu"), "gloo")
    shape = model_shape(config, cpu, 50_000)
    ((name, mixer_config),) = shape.mixer_configs.items()
    spec = mixer_spec(name, mixer_config, "local")
    mixer = build_module(spec, config=transformer_config(shape, cpu), layer_number=1, pg_collection=groups)
    return len(shape.mixers) * (mixer.num_parameters() + shape.feed_forward_parameters + 2 * config.model.hidden_size)


@pytest.mark.parametrize("size", SIZES)
def test_every_mixer_has_a_preset_and_nothing_else_has(size: str) -> None:
    assert {path.stem for path in (EXAMPLES / "mixers" / size).iterdir()} == set(load_all())


@pytest.mark.parametrize(("size", "name"), PRESETS)
def test_a_preset_has_the_parameters_of_the_transformer(size: str, name: str, one_process: Any) -> None:
    one = ["parallel.tensor=1", "parallel.sequence=false", "parallel.context=1"]
    config, attention = _load(size, name, *one), _load(size, "attention", *one)
    assert config.model.pattern == f"{name}*{attention.model.pattern.partition('*')[2]}"
    assert config.run.name == f"{name}_{SIZES[size].removesuffix('.yaml')}"
    wanted = _parameters(attention, one_process)
    assert _parameters(config, one_process) == pytest.approx(wanted, rel=0.02)
    if size == "110m":
        assert 80e6 < wanted < 90e6  # plus 77 million in embeddings of 50,000 tokens


@pytest.mark.parametrize(("size", "name"), PRESETS)
def test_a_preset_runs_on_a_node(size: str, name: str) -> None:
    check(_load(size, name), 8, load_all())
    check(_load(size, name, "parallel.tensor=2"), 8, load_all())
