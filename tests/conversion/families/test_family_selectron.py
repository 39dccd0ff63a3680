"""Errors of the Selectron family for a faulty config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_ext.config.schema import ModelConfig
from megatron_ext.conversion.core.family import SavedModel
from megatron_ext.conversion.huggingface.families.selectron import Selectron
from megatron_ext.mixers.core.settings import AttentionConfig, Top1ChunkConfig
from megatron_ext.utils.errors import UserError

SAVED = SavedModel(
    model=ModelConfig(
        pattern="(top1_chunk*3,attention)*2",
        num_query_groups=4,
        head_dim=64,
        ffn_hidden_size=2048,
        max_position_embeddings=512,
        rotary_base=500000.0,
    ),
    layers=(*["top1_chunk"] * 3, "attention") * 2,
    mixers={"attention": AttentionConfig(window=64), "top1_chunk": Top1ChunkConfig(top_k=2)},
    vocab_size=50257,
    seq_length=512,
)


def test_a_round_trip_of_the_config_is_lossless() -> None:
    config = Selectron().config(SAVED)
    assert Selectron().saved_model(config) == SAVED
    assert config["rope_theta"] == 500000.0
    assert config["mixers"]["attention"]["window"] == 64


def test_exported_code_files() -> None:
    names = [file.name for file in Selectron.code]
    assert {"modeling_selectron.py", "configuration_selectron.py"} < set(names)
    assert all(file.is_file() for file in Selectron.code)
    assert len(set(names)) == len(names)
    assert "__init__.py" not in names


def test_a_mixer_without_code_is_named() -> None:
    reason = Selectron().unsupported_reason(replace(SAVED, layers=("attention", "newest")))
    assert reason == "it has no newest layers"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocab_size": "many"}, 'config.json: vocab_size: "many" is not a whole number above 0; give one'),
        ({"seq_length": None}, "config.json: seq_length: null is not a whole number above 0; give one"),
        ({"hidden_size": 0.5}, "config.json: hidden_size: 0.5 is not a whole number"),
        ({"layer_mixers": ["attention"]}, "config.json: layer_mixers: differs from pattern"),
        ({"pattern": "attention*"}, "model.pattern: 'attention*' cannot be read"),
        ({"pattern": "atention", "layer_mixers": ["atention"]}, "config.json: layer_mixers: "),
        ({"mixers": []}, "config.json: mixers.attention: missing"),
        ({"mixers": {"attention": {"windw": 3}, "top1_chunk": {}}}, "config.json: mixers.attention.windw: "),
        ({"mixers": {"attention": {"window": -3}, "top1_chunk": {}}}, "config.json: mixers.attention.window: -3"),
    ],
)
def test_an_invalid_field_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        Selectron().saved_model(Selectron().config(SAVED) | changed)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("field", ["intermediate_size", "block", "mixers", "vocab_size", "layer_mixers"])
def test_a_missing_field_is_named(field: str) -> None:
    config = Selectron().config(SAVED)
    del config[field]
    with pytest.raises(UserError, match=f"^config.json: {field}: missing"):
        Selectron().saved_model(config)
