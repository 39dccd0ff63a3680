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
from megatron_ext.conversion.huggingface.families.fla_models import DEFAULTS, read_ffn
from megatron_ext.conversion.huggingface.families.one_mixer import OneMixerFamily
from megatron_ext.conversion.huggingface.families.tensors import flattened, renamed
from megatron_ext.mixers.core.settings import RWKV7Config
from megatron_ext.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

VALUE_RANK = 16
"""Rank of the low-rank projection of the value residual, whose matrices are all zeros."""

NEUTRAL = -256.0
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

    def why_not(self, saved: SavedModel) -> str | None:
        """Implement `Family.why_not`."""
        if len(saved.layers) == 1:
            return "model.pattern is of one layer, and it divides by the number of layers less one"
        return super().why_not(saved)

    def why_not_mixer(self, model: ModelConfig, mixer: RWKV7Config) -> str | None:
        """Implement `OneMixerFamily.why_not_mixer`."""
        assert model.head_dim is not None
        width = model.num_attention_heads * model.head_dim
        if width != model.hidden_size:
            return (
                f"its heads fill model.hidden_size {model.hidden_size}, and num_attention_heads * head_dim is {width}"
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
        hidden = fields.whole("hidden_size")
        fields.require("attn", None)
        fields.require("hidden_act", "sqrelu")
        fields.require("norm_first", False)
        fields.require("norm_bias", True)
        fields.require("v_low_rank_dim", VALUE_RANK)
        fields.require("value_dim", None, hidden, [hidden] * fields.layers("num_hidden_layers"))
        by = "num_heads" if fields["head_dim"] is None else "head_dim"
        size = fields.whole(by)
        other = fields.per("hidden_size", hidden, by, size)
        heads, head_dim = (size, other) if by == "num_heads" else (other, size)
        model = {
            "num_attention_heads": heads,
            "head_dim": head_dim,
            "ffn_hidden_size": read_ffn(fields, thirds=3, multiple=32),
            "norm_epsilon": fields.number("norm_eps"),
        }
        ranks = {ours: None if fields[theirs] is None else fields.whole(theirs) for ours, theirs in RANKS.items()}
        return model, ranks

    def layer_rules(self, model: ModelConfig) -> Iterator[Rule]:
        """Implement `OneMixerFamily.layer_rules`."""
        yield from self.norm_rules(model, "input_layernorm", "attn_norm")
        yield from self.norm_rules(model, "pre_mlp_layernorm.norm", "ffn_norm")
        yield renamed("pre_mlp_layernorm.mu", "ffn.x_k")
        yield renamed("mlp.linear_fc1.weight", "ffn.key.weight")
        yield renamed("mlp.linear_fc2.weight", "ffn.value.weight")

    def mixer_rules(self, model: ModelConfig, mixer: RWKV7Config) -> Iterator[Rule]:
        """Implement `OneMixerFamily.mixer_rules` for the first layer, which has no value residual."""
        heads = model.num_attention_heads
        yield _mixtures("mu", tuple(f"x_{name}" for name in "rwkvag"))
        for name in "rkv":
            yield flattened(f"{name}_proj", f"{name}_proj.weight", heads)
        for ours, theirs in {"decay": "w_lora", "rate": "a_lora", "gate": "g_lora"}.items():
            yield renamed(f"{ours}_down", f"{theirs}.lora.0.weight")
            yield flattened(f"{ours}_up", f"{theirs}.lora.2.weight", heads)
            if ours != "gate":
                yield flattened(f"{ours}_base", f"{theirs}.lora.2.bias", heads)
        yield flattened("removal_scale", "k_k", heads)
        yield flattened("key_rate", "k_a", heads)
        yield renamed("bonus", "r_k")
        yield flattened("group_norm_weight", "g_norm.weight", heads)
        yield flattened("group_norm_bias", "g_norm.bias", heads)
        yield renamed("out_proj.weight", "o_proj.weight")

    def rules(self, saved: SavedModel) -> Iterator[Rule]:
        """Implement `Family.rules`. After the first layer, the value projection's rule includes the value residual."""
        first = f"{self.layer}.0."
        for rule in super().rules(saved):
            is_value = rule.theirs[0].endswith("attn.v_proj.weight") and not rule.theirs[0].startswith(first)
            yield _with_neutral_residual(rule) if is_value else rule


def _mixtures(ours: str, theirs: tuple[str, ...]) -> Rule:
    """Return the rule between our mixtures [mixtures, hidden] and their separate tensors [1, 1, hidden]."""

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
        return [weight, down, up, weight.new_full((width,), NEUTRAL)]

    def to_ours(tensors: Sequence[Tensor]) -> list[Tensor]:
        weight, *residual = tensors
        for name, tensor, neutral in zip(names, residual, (0.0, 0.0, NEUTRAL), strict=True):
            # A tensor on the meta device has no values to check.
            if not tensor.is_meta and bool((tensor != neutral).any()):
                problem = "mixes the first layer's values into this layer's (value residual), which is not supported"
                hint = f"only models with it disabled are supported: biases {NEUTRAL:g}, weights 0"
                raise UserError(name, problem, hint)
        return values.to_ours([weight])

    return Rule(values.ours, values.theirs + names, to_theirs, to_ours, neutral=names)
