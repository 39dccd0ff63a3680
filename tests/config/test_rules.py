from __future__ import annotations

from typing import Any

import pytest
from config_fakes import EXAMPLES, MIXERS, config_of
from rule_cases import CASES, Sections

from megatron_ext.config.layout import Layout, sequence_parallel
from megatron_ext.config.load import load_config
from megatron_ext.config.rules import RULES, check
from megatron_ext.config.rules.nodes import check_nodes
from megatron_ext.config.schema import DataConfig, ModelConfig, RunConfig
from megatron_ext.utils.errors import UserError

TINY = {"hidden_size": 64, "num_attention_heads": 8, "pattern": "attention*4"}


def sections(given: Sections) -> RunConfig:
    return config_of(**{**given, "model": TINY | given.get("model", {})})


def line_of(config: RunConfig, processes: int) -> str:
    with pytest.raises(UserError) as caught:
        check(config, processes, MIXERS)
    return str(caught.value)


def test_all_rules_have_cases() -> None:
    assert [rule.name for rule in RULES] == list(CASES)
    assert all(rule.test.__doc__ for rule in RULES), "a rule gives its reason"


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    processes, broken, line, mended = CASES[name]
    assert line_of(sections(broken), processes) == line
    check(sections(mended), processes, MIXERS)


def test_second_conditions_of_rules() -> None:
    assert "is not divisible by parallel.context 2" in line_of(
        sections({"parallel": {"context": 2}, "data": {"seq_length": 31}}), 2
    )
    assert "5, with optimizer.schedule cosine" in line_of(sections({"optimizer": {"decay_steps": 5}}), 1)
    assert "data.cache_dir: here, with data.path" in line_of(sections({"data": {"cache_dir": "here"}}), 1)
    late = {"optimizer": {"schedule": "wsd", "decay_steps": 6, "warmup_steps": 5}, "training": {"steps": 10}}
    assert "warm-up 5 + decay_steps 6 is more than training.steps 10" in line_of(sections(late), 1)
    for name, said in (
        ("model.hidden_size", "changes the model"),
        ("parallel.tensor", "may be changed without being listed"),
        ("mixers.attention.width", "is not a field"),
    ):
        assert f"run.allow_changed: {name} {said}" in line_of(sections({"run": {"allow_changed": [name]}}), 1)
    assert "does not divide the world size 1" in line_of(sections({"parallel": {"tensor": 8}}), 1)
    groups = {"num_attention_heads": 8, "num_query_groups": 4, "pattern": "retnet"}
    heads = {"tensor": 2, "context": 4, "context_exchange": "heads"}
    assert line_of(sections({"parallel": heads, "model": groups}), 8) == (
        "parallel.context: retnet splits its heads, and num_query_groups 4 / tensor 2 = 2 heads are not divisible by "
        "context 4; choose a context that divides 2, or change model.num_query_groups, or set "
        "parallel.context_exchange=auto"
    )
    check(sections({"parallel": heads | {"context_exchange": "auto"}, "model": groups}), 8, MIXERS)
    rounds = {"tensor": 2, "context": 2, "context_exchange_rounds": 2}
    check(sections({"parallel": rounds | {"context_exchange": "states"}, "model": groups}), 8, MIXERS)
    check(sections({"parallel": rounds | {"context": 1}, "model": groups}), 8, MIXERS)


def test_unknown_mixer_of_a_configuration_built_in_python() -> None:
    config = RunConfig(data=DataConfig(path="x"), model=ModelConfig(pattern="atention*12"))
    assert line_of(config, 1).startswith("model.pattern: there is no mixer 'atention'; did you mean attention?")


def test_token_shifting_block_does_not_support_document_masking() -> None:
    config = sections({"model": {"block": "rwkv7"}, "data": {"reset_attention": True}})
    assert line_of(config, 1).startswith("data.reset_attention: true, but model.block rwkv7 shifts tokens")


def test_copy_engines_within_node_only() -> None:
    config = sections({"parallel": {"tensor": 2, "context": 2, "context_transport": "copy_engine"}})
    check_nodes(config, 32, 8)
    check_nodes(config, 4, 6)
    with pytest.raises(UserError) as refused:
        check_nodes(config, 12, 6)
    assert str(refused.value) == (
        "parallel.context_transport: copy_engine, and tensor 2 * context 2 = 4 processes do not divide nodes of 6; "
        "choose nccl, or a tensor * context that divides 6"
    )
    check_nodes(sections({"parallel": {"tensor": 2, "context": 2}}), 12, 6)
    check_nodes(sections({"parallel": {"tensor": 4, "context_transport": "copy_engine"}}), 12, 6)


@pytest.mark.parametrize(
    ("parallel", "seq_length", "on"),
    [
        ({}, 32, False),
        ({"tensor": 2}, 32, True),
        ({"tensor": 2, "context": 2}, 30, False),  # not divisible; an explicit true is refused
        ({"tensor": 2, "sequence": False}, 32, False),
        ({"tensor": 2, "sequence": True}, 32, True),
    ],
)
def test_sequence_parallelism_goes_with_tensor_parallelism(parallel: dict[str, Any], seq_length: int, on: bool) -> None:
    config = sections({"parallel": parallel, "data": {"seq_length": seq_length}})
    assert sequence_parallel(config) is on
    check(config, 4, MIXERS)


def test_layout() -> None:
    config = sections({"parallel": {"tensor": 2, "pipeline": 2}, "training": {"global_batch_size": 32}})
    assert check(config, 8, MIXERS) == Layout(world_size=8, data_parallel_size=2, num_micro_batches=4)


@pytest.mark.parametrize(
    ("example", "processes", "overrides"),
    [
        ("quickstart", 2, []),
        ("quickstart", 1, ["parallel.tensor=1"]),
        ("quickstart", 2, ["model.pattern=top1_chunk*4"]),
        ("quickstart", 2, ["model.pattern=gated_deltanet*4"]),
        ("110m_2k", 8, []),
        ("110m_2k", 1, []),
        ("110m_2k", 8, ["model.pattern=top1_element*12"]),
        ("1p3b_100k", 8, []),
        ("1p3b_100k", 8, ["parallel.tensor=2"]),
        ("1p3b_100k", 1, ["parallel.context=1", "run.device=cpu"]),
        ("1p3b_100k", 32, []),
        ("1p3b_100k", 8, ["model.pattern=gated_deltanet*24"]),
    ],
)
def test_examples(example: str, processes: int, overrides: list[str]) -> None:
    check(load_config(EXAMPLES / f"{example}.yaml", overrides, MIXERS), processes, MIXERS)


@pytest.mark.parametrize("example", ["110m_2k", "1p3b_100k"])
def test_examples_train_on_100b_tokens(example: str) -> None:
    config = load_config(EXAMPLES / f"{example}.yaml", [], MIXERS)
    tokens = config.training.steps * config.training.global_batch_size * config.data.seq_length
    assert tokens == pytest.approx(100e9, rel=1e-4)
