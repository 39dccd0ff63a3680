"""Features that only one side supports are refused, naming the field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from family_cases import ONE_MIXER_FAMILIES, Case, family_of, saved

from megatron_ext.config.pattern import MAX_LAYERS
from megatron_ext.conversion.huggingface.families import FAMILIES
from megatron_ext.platform.device import Platform
from megatron_ext.utils.errors import UserError

CPU = Platform(torch.device("cpu"), "gloo")
NSA = Case("nsa", {"num_attention_heads": 32, "num_query_groups": 2, "head_dim": 4})


def test_families_are_known_by_their_architecture() -> None:
    assert {name: family.architecture for name, family in FAMILIES.items()} == {name: name for name in FAMILIES}


UNSUPPORTED = [
    (Case("mamba", {"block": "transformer"}), "model.block is transformer"),
    (Case("gla", {"block": "rwkv7"}), "model.block is rwkv7"),
    (Case("gla", {"pattern": "gla,attention"}), "model.pattern has attention"),
    (Case("mamba", {"head_dim": 5}), "model.num_attention_heads * head_dim * mixers.mamba.expand is 40"),
    (Case("mamba2", {}, {"convolution": False}), "mixers.mamba2.convolution is false"),
    (Case("mamba2", {}, {"decay": "fixed"}), 'mixers.mamba2.decay is "fixed"'),
    (Case("mamba2", {}, {"group_norm": False}), "mixers.mamba2.group_norm is false"),
    (Case("gla", {}, {"decay_rank": 4}), "mixers.gla.decay_rank is 4"),
    (Case("gla", {}, {"decay_temperature": 2.0}), "mixers.gla.decay_temperature is 2"),
    (Case("nsa"), "1 query heads share a key"),
    (Case("nsa", {"num_attention_heads": 24, "num_query_groups": 1, "head_dim": 4}), "24 query heads share a key"),
    (Case("gla", {"normalization": "layer_norm"}), "model.normalization is layer_norm"),
    (Case("rwkv7", {"normalization": "rms_norm"}), "model.normalization is rms_norm"),
    (Case("rwkv7", {"pattern": "rwkv7"}), "model.pattern has one layer"),
    (Case("rwkv7", {"head_dim": 8}), "model.num_attention_heads * head_dim is 32, but"),
    (replace(NSA, settings={"position_encoding": "none"}), "mixers.nsa.position_encoding is none"),
]


@pytest.mark.parametrize(("case", "reason"), UNSUPPORTED, ids=[reason for _, reason in UNSUPPORTED])
def test_unsupported_models_are_refused_with_the_reason(case: Case, reason: str) -> None:
    family = family_of(case.mixer)
    found = family.unsupported_reason(saved(case.shape(CPU)))
    assert found is not None
    assert found.startswith(reason)


# Mixer, changed fields of its config.json, and the field that the error must name.
UNSUPPORTED_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", {"use_bias": True}, "use_bias"),
    ("mamba", {"use_conv_bias": False}, "use_conv_bias"),
    ("mamba", {"hidden_act": "gelu"}, "hidden_act"),
    ("mamba", {"time_step_rank": "some"}, "time_step_rank"),
    ("mamba", {"state_size": 0}, "state_size"),
    ("mamba", {"expand": True}, "expand"),
    ("mamba", {"layer_norm_epsilon": "small"}, "layer_norm_epsilon"),
    ("mamba", {"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ("mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
    ("mamba2", {"n_groups": 3}, "num_heads"),
    ("mamba2", {"expand": 3}, "expand"),
    ("gla", {"num_kv_heads": 2}, "num_kv_heads"),
    ("gla", {"feature_map": "relu"}, "feature_map"),
    ("gla", {"use_short_conv": True}, "use_short_conv"),
    ("gla", {"clamp_min": -1.0}, "clamp_min"),
    ("gla", {"elementwise_affine": False}, "elementwise_affine"),
    ("gla", {"fuse_norm": False}, "fuse_norm"),
    ("gla", {"hidden_act": "powlu"}, "hidden_act"),
    ("gla", {"expand_k": 0.3}, "expand_k"),
    ("gla", {"expand_v": 1.5}, "expand_v"),
    ("gla", {"attn": {"layers": [1], "num_heads": 4}}, "attn"),
    ("gla", {"attnres_block_size": 2}, "attnres_block_size"),
    ("gla", {"intermediate_size": 2.5}, "intermediate_size"),
    ("deltanet", {"use_short_conv": False}, "use_short_conv"),
    ("deltanet", {"use_beta": False}, "use_beta"),
    ("deltanet", {"allow_neg_eigval": True}, "allow_neg_eigval"),
    ("deltanet", {"qk_norm": "sum"}, "qk_norm"),
    ("deltanet", {"qk_activation": "relu"}, "qk_activation"),
    ("gated_deltanet", {"num_v_heads": 8}, "num_v_heads"),
    ("gated_deltanet", {"output_gate_activation": "sigmoid"}, "output_gate_activation"),
    ("gated_deltanet", {"expand_v": 1.5}, "expand_v"),
    ("gated_deltanet", {"allow_neg_eigval": True}, "allow_neg_eigval"),
    ("nsa", {"qkv_bias": True}, "qkv_bias"),
    ("nsa", {"block_size": 48}, "block_size"),
    ("nsa", {"block_counts": None}, "block_counts"),
    ("nsa", {"num_kv_heads": 5}, "num_heads"),
    ("nsa", {"num_hidden_layers": 0}, "num_hidden_layers"),
    ("nsa", {"num_hidden_layers": MAX_LAYERS + 1}, "num_hidden_layers"),
    ("rwkv7", {"num_hidden_layers": 10**18}, "num_hidden_layers"),
    ("rwkv7", {"norm_first": True}, "norm_first"),
    ("rwkv7", {"norm_bias": False}, "norm_bias"),
    ("rwkv7", {"v_low_rank_dim": 32}, "v_low_rank_dim"),
    ("rwkv7", {"value_dim": 48}, "value_dim"),
    ("rwkv7", {"head_dim": 5}, "hidden_size"),
    ("rwkv7", {"hidden_act": "relu"}, "hidden_act"),
    ("nsa", {"selectron": {"model": {"head_dim": 7}}}, "selectron"),
    ("nsa", {"selectron": {"model": {"pattern": "nsa,attention"}}}, "selectron"),
    ("nsa", {"selectron": {"model": {"block": "rwkv7"}}}, "selectron"),
    ("nsa", {"selectron": {"mixer": {"window": 3}}}, "selectron"),
    ("nsa", {"selectron": {"model": {"heads": 4}}}, "selectron.model.heads"),
    ("nsa", {"selectron": 3}, "selectron"),
]
CONFIG_IDS = [f"{mixer}-{changed}" for mixer, changed, _ in UNSUPPORTED_CONFIGS]


@pytest.mark.parametrize(("mixer", "changed", "field"), UNSUPPORTED_CONFIGS, ids=CONFIG_IDS)
def test_unsupported_configs_are_refused_by_their_field(mixer: str, changed: dict[str, Any], field: str) -> None:
    case, family = NSA if mixer == "nsa" else Case(mixer), family_of(mixer)
    with pytest.raises(UserError) as caught:
        family.saved_model(family.config(saved(case.shape(CPU))) | changed)
    assert caught.value.where == f"config.json: {field}"
    assert "\n" not in str(caught.value)


def test_the_layers_of_a_llama_are_limited() -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 8}
    read = FAMILIES["LlamaForCausalLM"].saved_model
    assert len(read({**sizes, "num_hidden_layers": MAX_LAYERS}).layers) == MAX_LAYERS
    with pytest.raises(UserError, match=r"^config\.json: num_hidden_layers: 1000000000 is more than 10000 layers; "):
        read({**sizes, "num_hidden_layers": 10**9})


def test_defaults_of_missing_fields_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    for architecture in ("MambaForCausalLM", "Mamba2ForCausalLM"):
        complete = getattr(transformers, architecture).config_class().to_dict()
        read = FAMILIES[architecture].saved_model
        assert read({}) == read(complete)


def test_defaults_of_missing_fields_are_those_of_flash_linear_attention() -> None:
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    from beside_fla import fla

    for architecture in ONE_MIXER_FAMILIES.keys() - {"MambaForCausalLM", "Mamba2ForCausalLM"}:
        given = {"norm_first": False}  # a field of RWKV-7 whose default differs from ours
        complete = fla(f"models.{architecture}").config_class(**given).to_dict()
        assert FAMILIES[architecture].saved_model(given) == FAMILIES[architecture].saved_model(complete)


def test_fields_without_effect_on_the_model_are_ignored() -> None:
    family, model = family_of("mamba"), saved(Case("mamba").shape(CPU))
    more = {"residual_in_fp32": True, "time_step_min": 0.1, "use_mambapy": True, "rescale_prenorm_residual": True}
    assert family.saved_model(family.config(model) | more) == model


@pytest.mark.parametrize(("hidden", "heads", "head_dim"), [(768, 12, 64), (96, 3, 32), (24, 3, 8)])
def test_heads_of_an_imported_mamba(hidden: int, heads: int, head_dim: int) -> None:
    model = family_of("mamba").saved_model({"hidden_size": hidden}).model
    assert (model.num_attention_heads, model.num_query_groups, model.head_dim) == (heads, heads, head_dim)


@pytest.mark.parametrize("name", ["0.weight", "2.weight", "2.bias"])
def test_a_nonzero_value_residual_is_refused(name: str) -> None:
    model = saved(Case("rwkv7").shape(CPU))
    (rule,) = [rule for rule in family_of("rwkv7").rules(model) if len(rule.theirs) == 4]
    assert rule.theirs[0] == "model.layers.1.attn.v_proj.weight"
    theirs = dict(zip(rule.theirs, rule.to_theirs([torch.ones(4, 6, 24)]), strict=True))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert theirs["model.layers.1.attn.v_lora.lora.2.bias"].to(dtype).sigmoid().unique().tolist() == [0.0]
    theirs[f"model.layers.1.attn.v_lora.lora.{name}"].view(-1)[5] = 0.5
    with pytest.raises(UserError, match="mixes the first layer's values") as caught:
        rule.to_ours(list(theirs.values()))
    assert caught.value.where == f"model.layers.1.attn.v_lora.lora.{name}"


def test_values_without_a_field_are_written_to_the_section() -> None:
    plain = saved(Case("gla").shape(CPU))
    config = family_of("gla").config(plain)
    assert "selectron" not in config
    other = replace(plain, model=replace(plain.model, vocab_size_multiple=8, pattern="gla,gla"), seq_length=16)
    section = {"model": {"vocab_size_multiple": 8, "pattern": "gla,gla"}, "seq_length": 16}
    assert family_of("gla").config(other) == config | {"selectron": section}
    assert family_of("gla").saved_model(config | {"selectron": section}) == other
