"""Conversion between the Transformer++ and `LlamaForCausalLM` of transformers.

Both are the same model with different parameter names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_ext.config.schema import ModelConfig
from megatron_ext.config.validate import show, validate
from megatron_ext.conversion.core.family import Rule, SavedModel
from megatron_ext.conversion.huggingface.families.fields import Fields, where
from megatron_ext.conversion.huggingface.families.tensors import add_prefixes, rename_rule, split_rows_rule
from megatron_ext.mixers.core.settings import AttentionConfig
from megatron_ext.utils.errors import UserError

_PLAIN = AttentionConfig()
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "pretraining_tp": 1,
    "quantization_config": None,
}
"""Fields of config.json for which our model supports only one value. The value is also the default."""

_DEFAULTS: dict[str, Any] = {
    **_FIXED,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "rope_parameters": None,
    "rope_theta": None,
    "partial_rotary_factor": 1.0,
}


class Llama:
    """Family of `LlamaForCausalLM`. Implements `Family`."""

    architecture = "LlamaForCausalLM"

    def unsupported_reason(self, saved: SavedModel) -> str | None:
        """Implement `Family.unsupported_reason`."""
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
        """Implement `Family.config`."""
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
            # transformers 5 reads `rope_parameters`, earlier versions read `rope_theta`.
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
        """Implement `Family.saved_model`."""
        fields = Fields(config, _DEFAULTS)
        for field, value in _FIXED.items():
            fields.require(field, value)
        layers, length = fields.layers("num_hidden_layers"), fields.positive_int("max_position_embeddings")
        model = {
            "pattern": f"attention*{layers}",
            "hidden_size": fields.positive_int("hidden_size"),
            **fields.heads("num_attention_heads", "num_key_value_heads", "head_dim"),
            "ffn_hidden_size": fields.positive_int("intermediate_size"),
            "max_position_embeddings": length,
            "tie_embeddings": fields.flag("tie_word_embeddings"),
            "rotary_base": _rotary_base(fields),
            "norm_epsilon": fields.positive_number("rms_norm_eps"),
            "init_std": fields.positive_number("initializer_range"),
        }
        return SavedModel(
            model=validate(ModelConfig, model, where("")),
            layers=("attention",) * layers,
            mixers={"attention": _PLAIN},
            vocab_size=fields.positive_int("vocab_size"),
            seq_length=length,
        )

    def rules(self, saved: SavedModel) -> Iterator[Rule]:
        """Implement `Family.rules`."""
        yield rename_rule("embedding.word_embeddings.weight", "model.embed_tokens.weight")
        for layer in range(len(saved.layers)):
            yield from add_prefixes(_layer(saved.model), f"decoder.layers.{layer}.", f"model.layers.{layer}.")
        yield rename_rule("decoder.final_layernorm.weight", "model.norm.weight")
        if not saved.model.tie_embeddings:
            yield rename_rule("output_layer.weight", "lm_head.weight")


def _rotary_base(fields: Fields) -> float:
    """Return the rotary base from `rope_parameters` (transformers 5) or `rope_theta` (earlier), or Llama's default."""
    fields.require("partial_rotary_factor", 1.0)
    rope = {} if fields["rope_parameters"] is None else fields["rope_parameters"]
    if not isinstance(rope, dict):
        raise UserError(where("rope_parameters"), f"{show(rope)} is not a mapping of fields", "remove it")
    base = 10000.0 if fields["rope_theta"] is None else fields.positive_number("rope_theta")
    defaults = {"rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": base}
    parameters = Fields(rope, defaults, prefix=where("rope_parameters."))
    parameters.require("rope_type", "default")
    parameters.require("partial_rotary_factor", 1.0)
    return parameters.positive_number("rope_theta")


def _layer(model: ModelConfig) -> Iterator[Rule]:
    assert model.num_query_groups is not None
    assert model.head_dim is not None
    assert model.ffn_hidden_size is not None
    yield rename_rule("input_layernorm.weight", "input_layernorm.weight")
    # Our projection stores the queries, the key and the value of a query group next to each other.
    queries, d = model.num_attention_heads // model.num_query_groups, model.head_dim
    attention = {f"self_attn.{name}_proj.weight": width for name, width in {"q": queries * d, "k": d, "v": d}.items()}
    yield split_rows_rule("self_attention.in_proj.weight", attention, model.num_query_groups)
    yield rename_rule("self_attention.out_proj.weight", "self_attn.o_proj.weight")
    yield rename_rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight")
    # Megatron-LM stacks SwiGLU's input matrices as [gate; value].
    halves = {f"mlp.{name}_proj.weight": model.ffn_hidden_size for name in ("gate", "up")}
    yield split_rows_rule("mlp.linear_fc1.weight", halves, head_groups=1)
    yield rename_rule("mlp.linear_fc2.weight", "mlp.down_proj.weight")
