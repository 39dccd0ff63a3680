"""Conversion between RWKV-7 and flash-linear-attention's `RWKV7ForCausalLM`.

In flash-linear-attention, each layer after the first mixes the first layer's values into its own (value residual). Our
RWKV-7 has no value residual. An exported model has one that contributes exactly zero. Only models with such a value
residual can be imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_ext.config.schema import ModelConfig
from megatron_ext.conversion.core.family import Rule, SavedModel
from megatron_ext.conversion.huggingface.families.fields import Fields
from megatron_ext.conversion.huggingface.families.fla_models import DEFAULTS, read_ffn_hidden_size
from megatron_ext.conversion.huggingface.families.one_mixer import OneMixerFamily
from megatron_ext.conversion.huggingface.families.tensors import flatten_rule, rename_rule
from megatron_ext.mixers.core.settings import RWKV7Config
from megatron_ext.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

VALUE_RANK = 16
"""Rank of the low-rank projection of the value residual, whose matrices are all zeros."""

NEUTRAL_BIAS = -256.0
"""Bias of the value residual's gate, whose sigmoid is then 0 in bf16, fp16 and fp32.

All of these types represent the number exactly.
"""

RANKS = {"decay_rank": "decay_low_rank_dim", "rate_rank": "a_low_rank_dim", "gate_rank": "gate_low_rank_dim"}


class RWKV7Family(OneMixerFamily):
    """Family of `RWKV7ForCausalLM`. The additional norm after the embedding (`norm_first`) is not supported."""

    architecture: str = "RWKV7ForCausalLM"
    model_type: ClassVar[str] = "rwkv7"
    mixer: ClassVar[str] = "rwkv7"
    block: ClassVar[str] = "rwkv7"
    normalization: ClassVar[str] = "layer_norm"
    embedding: ClassVar[str] = "model.embeddings"
    final_norm: ClassVar[str] = "model.norm"
    layer: ClassVar[str] = "model.layers"
    mixer_name: ClassVar[str] = "attn"
    defaults: ClassVar[Mapping[str, Any]] = {
        **DEFAULTS,
        "head_dim": 64,
        "num_heads": None,
        "value_dim": None,
        "decay_low_rank_dim": 64,
        "gate_low_rank_dim": 128,
        "a_low_rank_dim": 64,
        "v_low_rank_dim": 16,
        "hidden_act": "sqrelu",
        "norm_first": True,
        "norm_bias": True,
        "norm_eps": 1e-5,
    }

    def unsupported_reason(self, saved: SavedModel) -> str | None:
        """Implement `Family.unsupported_reason`."""
        if len(saved.layers) == 1:
            return "model.pattern has one layer, but the architecture requires at least two"
        return super().unsupported_reason(saved)

    def unsupported_mixer_reason(self, model: ModelConfig, mixer: RWKV7Config) -> str | None:
        """Implement `OneMixerFamily.unsupported_mixer_reason`."""
        assert model.head_dim is not None
        width = model.num_attention_heads * model.head_dim
        if width != model.hidden_size:
            return (
                f"model.num_attention_heads * head_dim is {width}, but the architecture requires model.hidden_size "
                f"{model.hidden_size}"
            )
        return None

    def config_fields(self, model: ModelConfig, mixer: RWKV7Config) -> dict[str, Any]:
        """Implement `OneMixerFamily.config_fields`. Ranks that are None have the same default in both libraries."""
        return {
            "head_dim": model.head_dim,
            "num_heads": model.num_attention_heads,
            **{theirs: getattr(mixer, ours) for ours, theirs in RANKS.items()},
            "v_low_rank_dim": VALUE_RANK,
            "intermediate_size": model.ffn_hidden_size,
            "hidden_act": "sqrelu",
            "norm_first": False,
            "norm_bias": True,
            "norm_eps": model.norm_epsilon,
            # The fused variant would add 1e-6 to the squared length of a key when it normalizes the key.
            "fuse_norm": False,
            "max_position_embeddings": model.max_position_embeddings,
        }

    def read(self, fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
        """Implement `OneMixerFamily.read`."""
        hidden = fields.positive_int("hidden_size")
        fields.require("attn", None)
        fields.require("hidden_act", "sqrelu")
        fields.require("norm_first", False)
        fields.require("norm_bias", True)
        fields.require("v_low_rank_dim", VALUE_RANK)
        fields.require("value_dim", None, hidden, [hidden] * fields.layers("num_hidden_layers"))
        divisor_name = "num_heads" if fields["head_dim"] is None else "head_dim"
        size = fields.positive_int(divisor_name)
        quotient = fields.divide("hidden_size", hidden, divisor_name, size)
        heads, head_dim = (size, quotient) if divisor_name == "num_heads" else (quotient, size)
        model = {
            "num_attention_heads": heads,
            "head_dim": head_dim,
            "ffn_hidden_size": read_ffn_hidden_size(fields, thirds=3, multiple=32),
            "norm_epsilon": fields.positive_number("norm_eps"),
        }
        given_ranks = {ours: theirs for ours, theirs in RANKS.items() if fields[theirs] is not None}
        ranks = {ours: fields.positive_int(theirs) for ours, theirs in given_ranks.items()}
        return model, dict.fromkeys(RANKS) | ranks

    def layer_rules(self, model: ModelConfig) -> Iterator[Rule]:
        """Implement `OneMixerFamily.layer_rules`."""
        yield from self.norm_rules(model, "input_layernorm", "attn_norm")
        yield from self.norm_rules(model, "pre_mlp_layernorm.norm", "ffn_norm")
        yield rename_rule("pre_mlp_layernorm.mu", "ffn.x_k")
        yield rename_rule("mlp.linear_fc1.weight", "ffn.key.weight")
        yield rename_rule("mlp.linear_fc2.weight", "ffn.value.weight")

    def mixer_rules(self, model: ModelConfig, mixer: RWKV7Config) -> Iterator[Rule]:
        """Implement `OneMixerFamily.mixer_rules` for the first layer, which has no value residual."""
        heads = model.num_attention_heads
        yield _mixing_rule("mu", tuple(f"x_{name}" for name in "rwkvag"))
        for name in "rkv":
            yield flatten_rule(f"{name}_proj", f"{name}_proj.weight", heads)
        for ours, theirs in {"decay": "w_lora", "rate": "a_lora", "gate": "g_lora"}.items():
            yield rename_rule(f"{ours}_down", f"{theirs}.lora.0.weight")
            yield flatten_rule(f"{ours}_up", f"{theirs}.lora.2.weight", heads)
            if ours != "gate":
                yield flatten_rule(f"{ours}_base", f"{theirs}.lora.2.bias", heads)
        yield flatten_rule("removal_scale", "k_k", heads)
        yield flatten_rule("key_rate", "k_a", heads)
        yield rename_rule("bonus", "r_k")
        yield flatten_rule("group_norm_weight", "g_norm.weight", heads)
        yield flatten_rule("group_norm_bias", "g_norm.bias", heads)
        yield rename_rule("out_proj.weight", "o_proj.weight")

    def rules(self, saved: SavedModel) -> Iterator[Rule]:
        """Implement `Family.rules`. After the first layer, the value projection's rule includes the value residual."""
        first = f"{self.layer}.0."
        for rule in super().rules(saved):
            is_value = rule.theirs[0].endswith("attn.v_proj.weight") and not rule.theirs[0].startswith(first)
            yield _with_neutral_residual(rule) if is_value else rule


def _mixing_rule(ours: str, theirs: tuple[str, ...]) -> Rule:
    """Return the rule between our token-shift weights [len(theirs), hidden] and their tensors [1, 1, hidden]."""

    def to_ours(tensors: Sequence[Tensor]) -> list[Tensor]:
        import torch

        return [torch.cat([tensor.view(1, -1) for tensor in tensors])]

    return Rule(
        (ours,),
        theirs,
        lambda tensors: [row.view(1, 1, -1) for row in tensors[0].contiguous().unbind()],
        to_ours,
    )


def _with_neutral_residual(values: Rule) -> Rule:
    """Return the rule of a value projection, extended by a value residual that contributes zero.

    Their value is v + sigmoid(up(down(x)) + bias) (v_first - v), where v_first is the first layer's value.
    """
    prefix = values.theirs[0].removesuffix("v_proj.weight") + "v_lora.lora."
    names = tuple(f"{prefix}{name}" for name in ("0.weight", "2.weight", "2.bias"))

    def to_theirs(tensors: Sequence[Tensor]) -> list[Tensor]:
        (weight,) = values.to_theirs(tensors)
        width, hidden = weight.shape
        down, up = weight.new_zeros(VALUE_RANK, hidden), weight.new_zeros(width, VALUE_RANK)
        return [weight, down, up, weight.new_full((width,), NEUTRAL_BIAS)]

    def to_ours(tensors: Sequence[Tensor]) -> list[Tensor]:
        weight, *residual = tensors
        for name, tensor, neutral in zip(names, residual, (0.0, 0.0, NEUTRAL_BIAS), strict=True):
            # A tensor on the meta device has no values to check.
            if not tensor.is_meta and bool((tensor != neutral).any()):
                problem = "mixes the first layer's values into this layer's (value residual), which is not supported"
                hint = f"only models with it disabled are supported: biases {NEUTRAL_BIAS:g}, weights 0"
                raise UserError(name, problem, hint)
        return values.to_ours([weight])

    return Rule(values.ours, values.theirs + names, to_theirs, to_ours, neutral=names)
