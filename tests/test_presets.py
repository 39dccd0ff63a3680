"""Example presets: every mixer at the study's two sizes has the parameter count of the Transformer++."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.spec_utils import build_module

from megatron_ext.config.load import load_config
from megatron_ext.config.rules import check
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.sweep_file import read_sweep
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.model.build import transformer_config
from megatron_ext.model.shape import model_shape
from megatron_ext.model.specs import mixer_spec
from megatron_ext.planning.fields import split_plan
from megatron_ext.platform.device import Platform

EXAMPLES = Path(__file__).parents[1] / "examples"
SIZES = {"110m": "110m_2k.yaml", "1p3b": "1p3b_100k.yaml"}
STUDY = EXAMPLES / "study"
STUDY_TEXTS = ("limited", "mixed", "books", "code")
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


def _study_run(text: str, *overrides: str) -> RunConfig:
    return load_config(EXAMPLES / SIZES["110m"], [*overrides, str(STUDY / f"{text}.yaml")], load_all())


@pytest.mark.parametrize("sweep", sorted({path.stem for path in STUDY.glob("*.yaml")}.difference(STUDY_TEXTS)))
def test_a_study_sweep_runs_on_a_node(sweep: str) -> None:
    """Load the first run and those that differ from it along one axis."""
    swept = read_sweep(STUDY / f"{sweep}.yaml")
    assert swept.config.samefile(EXAMPLES / SIZES["110m"])
    first = next(iter(swept.runs)).split("-")
    changed = {name: [label for label in name.split("-") if label not in first] for name in swept.runs}
    assert {"seed2", "seed3"} <= {label for labels in changed.values() for label in labels} or swept.chosen
    near = [name for name, labels in changed.items() if len(labels) < 2 and labels[:1] != ["seed3"]]
    configs = [_study_run("limited", *split_plan(swept.runs[name], ())[1]) for name in near]
    for config in configs:
        check(config, 8, load_all())
        batch = config.training.global_batch_size * config.data.seq_length
        assert (batch, config.training.evaluation_sequences * config.data.seq_length) == (256 * 2048, 2000 * 2048)
    differing = [(str(c.mixers), c.model.pattern, c.data.seq_length, c.training.seed, c.optimizer.lr) for c in configs]
    assert len(set(differing)) == len(configs)


def test_limited_and_mixed_text_differ_only_in_training_text() -> None:
    limited, mixed = (_study_run(text).data for text in ("limited", "mixed"))
    assert replace(mixed, train_domains=limited.train_domains, weights=limited.weights) == limited
    web, trained, tested = (
        set(domains or ()) for domains in (limited.train_domains, mixed.train_domains, mixed.test_domains)
    )
    added = trained - web
    assert web < trained
    assert not web & tested
    assert added < tested  # the other test domains remain out of domain
    of_limited, of_mixed = limited.weights or {}, mixed.weights or {}
    assert sum(of_mixed[domain] for domain in added) / sum(of_mixed.values()) == pytest.approx(0.07)
    assert len({of_mixed[domain] / of_limited[domain] for domain in web}) == 1


def test_study_texts_have_own_run_folders() -> None:
    configs = [_study_run(text) for text in STUDY_TEXTS]
    for config in configs:
        check(config, 8, load_all())
    for values in ({config.run.dir for config in configs}, {str(config.data.train_domains) for config in configs}):
        assert len(values) == len(STUDY_TEXTS)
