"""Effects of field changes on existing runs: every field is classified, and comparisons find differences."""

from __future__ import annotations

from dataclasses import replace

import pytest
from config_fakes import config_of

from megatron_ext.config.derive import derive
from megatron_ext.config.effects import (
    DERIVED,
    EFFECTS,
    Change,
    Effect,
    changes,
    distinguishes_recipes,
    effect_of,
    flat,
)
from megatron_ext.config.load import known_keys


def test_all_fields_have_an_effect() -> None:
    """A new field fails here until `effects` lists it."""
    fields = {field for field in known_keys({}) if not field.startswith("mixers.")}
    assert set(EFFECTS) == fields
    assert set(DERIVED) <= fields


@pytest.mark.parametrize(
    ("field", "effect", "of_a_recipe"),
    [
        ("parallel.tensor", Effect.NOTHING, False),
        ("training.micro_batch_size", Effect.NOTHING, False),
        ("training.evaluate_every", Effect.MEASURED, False),
        ("retrieval.lengths", Effect.MEASURED, False),
        ("resilience.on_spike", Effect.FUTURE, True),
        ("training.steps", Effect.SCHEDULE, True),
        ("training.seed", Effect.PAST, False),
        ("training.fp8", Effect.PAST, True),
        ("data.reset_attention", Effect.PAST, True),
        ("data.weights", Effect.PAST, True),
        ("optimizer.weight_decay", Effect.PAST, True),
        ("mixers.attention.window", Effect.PAST, True),
        ("model.hidden_size", Effect.MODEL, True),
        ("optimizer.name", Effect.MODEL, True),
    ],
)
def test_effects(field: str, effect: Effect, of_a_recipe: bool) -> None:
    assert effect_of(field) is effect
    assert distinguishes_recipes(field) == of_a_recipe


def test_flat_configuration_includes_defaults() -> None:
    config = config_of(model={"pattern": "attention * 2"}, mixers={"rwkv6": {}})
    fields = flat(config)
    assert fields["model.pattern"] == "attention*2"
    assert fields["optimizer.betas"] == [0.9, 0.95]
    assert "mixers.attention.window" in fields
    assert not any(field.startswith("mixers.rwkv6") for field in fields)
    of_an_older_schema = flat({"data": {"path": "x"}, "model": {"pattern": "attention*2", "gone": 1}})
    assert of_an_older_schema["training.fp8"] == "none"
    assert of_an_older_schema["optimizer.name"] == "adamw"
    assert of_an_older_schema["optimizer.betas"] == [0.9, 0.95]
    assert "model.gone" not in of_an_older_schema
    assert set(EFFECTS) <= set(of_an_older_schema)


def test_credentials_do_not_reach_checkpoints() -> None:
    assert flat(config_of(data={"path": "s3://KEY:SECRET@bucket/data"}))["data.path"] == "s3://***@bucket/data"


def test_derived_fields_are_not_reported_as_changed() -> None:
    config = derive(config_of(data={"seq_length": 64}))
    longer = derive(config_of(data={"seq_length": 128}))
    assert longer.model.max_position_embeddings == 128
    assert changes(flat(config), flat(longer)) == [Change("data.seq_length", 64, 128)]
    table = replace(config, model=replace(config.model, max_position_embeddings=128))
    assert [one.field for one in changes(flat(config), flat(table))] == ["model.max_position_embeddings"]


def test_absent_mixer_field_has_default() -> None:
    before = {"mixers.attention.temperature": 1.0}
    after = {"mixers.attention.temperature": 1.0, "mixers.attention.window": None, "mixers.attention.new": 3}
    assert changes(before, after, {"mixers.attention.new": 3}) == []
    assert [one.field for one in changes(before, after)] == ["mixers.attention.new"]


def test_values_compare_as_in_yaml() -> None:
    assert changes({"optimizer.betas": (0.9, 0.95)}, {"optimizer.betas": [0.9, 0.95]}) == []
    assert changes({"optimizer.lr": 1}, {"optimizer.lr": 1.0}) == []
    assert [one.field for one in changes({"data.reset_attention": False}, {"data.reset_attention": 0})]


def test_equal_configurations_have_no_changes() -> None:
    assert changes(flat(config_of()), flat(config_of())) == []
