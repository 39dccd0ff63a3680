"""The Transformer++ and `LlamaForCausalLM` of transformers: the same model under other names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_ext.checkpoint.conversion.family import Rule, SavedModel
from megatron_ext.config.schema import ModelConfig
from megatron_ext.errors import UserError
from megatron_ext.mixers.attention import AttentionConfig

_PLAIN = AttentionConfig()
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "pretraining_tp": 1,
    "quantization_config": None,
}
"""Fields of config.json that our model has one value for; absent, they have it, too."""

_MEND = "only a Llama without it is the Transformer++"


class Llama:
    """See `Family`."""

    architecture = "LlamaForCausalLM"

    def why_not(self, saved: SavedModel) -> str | None:
        """See `Family.why_not`."""
        others = sorted(set(saved.layers) - {"attention"})
        if others:
            return f"it has no {', '.join(others)} layers"
        if saved.model.block != "transformer":
            return f"it has no {saved.model.block} block"
        if saved.model.normalization != "rms_norm":
            return f"it has no {saved.model.normalization}"
        attention = saved.mixers["attention"]
        for field in ("window", "temperature", "random_keys", "position_encoding"):
            if getattr(attention, field) != getattr(_PLAIN, field):
                return f"it has no mixers.attention.{field} {getattr(attention, field)}"
        return None

    def config(self, saved: SavedModel) -> dict[str, Any]:
        """See `Family.config`."""
        model = saved.model
        return {
            "architectures": [self.architecture],
            "model_type": "llama",
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_hidden_size,
            "num_hidden_layers": len(saved.layers),
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_query_groups,
            "head_dim": model.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": model.max_position_embeddings,
            "initializer_range": model.init_std,
            "rms_norm_eps": model.norm_epsilon,
            # transformers 5 reads the second, earlier ones the first.
            "rope_theta": model.rotary_base,
            "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": model.tie_embeddings,
            "vocab_size": saved.vocab_size,
            "use_cache": True,
        }

    def saved_model(self, config: dict[str, Any]) -> SavedModel:
        """See `Family.saved_model`."""
        for field, value in _FIXED.items():
            if config.get(field, value) != value:
                raise UserError(f"config.json: {field}", f"{config[field]!r} is not {value!r}", _MEND)
        heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
        length = config.get("max_position_embeddings", 2048)
        model = ModelConfig(
            pattern=f"attention*{layers}",
            hidden_size=config["hidden_size"],
            num_attention_heads=heads,
            num_query_groups=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn_hidden_size=config["intermediate_size"],
            max_position_embeddings=length,
            tie_embeddings=config.get("tie_word_embeddings", False),
            rotary_base=_rotary_base(config),
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            init_std=float(config.get("initializer_range", 0.02)),
        )
        return SavedModel(
            model=model,
            layers=("attention",) * layers,
            mixers={"attention": _PLAIN},
            vocab_size=config["vocab_size"],
            seq_length=length,
        )

    def rules(self, saved: SavedModel) -> Iterator[Rule]:
        """See `Family.rules`."""
        yield _same("embedding.word_embeddings.weight", "model.embed_tokens.weight")
        for layer in range(len(saved.layers)):
            yield from _layer(saved.model, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
        yield _same("decoder.final_layernorm.weight", "model.norm.weight")
        if not saved.model.tie_embeddings:
            yield _same("output_layer.weight", "lm_head.weight")


def _rotary_base(config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        problem = f"rope_type {rope['rope_type']!r} is not 'default'"
        raise UserError("config.json: rope_parameters", problem, _MEND)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problem = f"partial_rotary_factor {rope['partial_rotary_factor']} is not 1"
        raise UserError("config.json: rope_parameters", problem, _MEND)
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)


def _layer(model: ModelConfig, ours: str, theirs: str) -> Iterator[Rule]:
    yield _same(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight")
    attention = tuple(f"{theirs}self_attn.{name}_proj.weight" for name in "qkv")
    split, join = partial(_split_groups, model), partial(_join_groups, model)
    yield Rule((f"{ours}self_attention.in_proj.weight",), attention, split, join)
    yield _same(f"{ours}self_attention.out_proj.weight", f"{theirs}self_attn.o_proj.weight")
    yield _same(f"{ours}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight")
    gated = (f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight")
    yield Rule((f"{ours}mlp.linear_fc1.weight",), gated, _halves, _joined)
    yield _same(f"{ours}mlp.linear_fc2.weight", f"{theirs}mlp.down_proj.weight")


def _same(ours: str, theirs: str) -> Rule:
    return Rule((ours,), (theirs,), list, list)


def _halves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(tensors[0].chunk(2))


def _joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat(list(tensors))]


def _split_groups(model: ModelConfig, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Rows [queries | key | value] of each query group to the queries, keys and values of all."""
    groups, width = model.num_query_groups, model.head_dim
    assert groups is not None
    assert width is not None
    queries = model.num_attention_heads // groups * width
    rows = tensors[0].unflatten(0, (groups, queries + 2 * width))
    return [part.flatten(0, 1) for part in rows.split([queries, width, width], 1)]


def _join_groups(model: ModelConfig, tensors: Sequence[Tensor]) -> list[Tensor]:
    groups = model.num_query_groups
    assert groups is not None
    return [torch.cat([tensor.unflatten(0, (groups, -1)) for tensor in tensors], 1).flatten(0, 1)]
