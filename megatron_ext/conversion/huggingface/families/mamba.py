"""Conversion between Mamba and transformers' `MambaForCausalLM`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatron_ext.config.schema import ModelConfig
from megatron_ext.conversion.core.family import Rule
from megatron_ext.conversion.huggingface.families.fields import Fields
from megatron_ext.conversion.huggingface.families.one_mixer import OneMixerFamily
from megatron_ext.conversion.huggingface.families.tensors import (
    flatten_rule,
    rename_rule,
    reorder_rows_rule,
    reshape_rule,
)
from megatron_ext.mixers.core.settings import MambaConfig

MAX_HEAD_DIM = 64
"""Largest head width of an imported Mamba model.

Our Mamba has heads, which tensor parallelism distributes over ranks. Theirs has none.
"""


class MambaModels(OneMixerFamily):
    """Base class of transformers' Mamba and Mamba-2, whose layer is RMSNorm, mixer and residual.

    `residual_in_fp32` only affects rounding, so both values are accepted. Our residual has the precision of the
    weights.
    """

    block: ClassVar[str] = "mixer"
    embedding: ClassVar[str] = "backbone.embeddings"
    final_norm: ClassVar[str] = "backbone.norm_f"
    layer: ClassVar[str] = "backbone.layers"
    mixer_name: ClassVar[str] = "mixer"

    @abstractmethod
    def mixer_fields(self, model: ModelConfig, mixer: Any) -> dict[str, Any]:
        """Return the fields of config.json that Mamba and Mamba-2 do not share."""

    @abstractmethod
    def read_mixer(self, fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields of `ModelConfig` and of the mixer's configuration; the inverse of `mixer_fields`."""

    @abstractmethod
    def width(self, model: ModelConfig, mixer: Any) -> int:
        """Return the number of channels of all heads."""

    def unsupported_mixer_reason(self, model: ModelConfig, mixer: Any) -> str | None:
        """Implement `OneMixerFamily.unsupported_mixer_reason`."""
        width = self.width(model, mixer)
        if width % model.hidden_size:
            return (
                f"model.num_attention_heads * head_dim * mixers.{self.mixer}.expand is {width}, "
                f"but the architecture requires a multiple of model.hidden_size {model.hidden_size}"
            )
        return None

    def config_fields(self, model: ModelConfig, mixer: Any) -> dict[str, Any]:
        """Implement `OneMixerFamily.config_fields`."""
        return {
            "state_size": mixer.state_size,
            "expand": self.width(model, mixer) // model.hidden_size,
            "conv_kernel": mixer.conv_kernel_size,
            "use_conv_bias": True,
            "use_bias": False,
            "hidden_act": "silu",
            "layer_norm_epsilon": model.norm_epsilon,
            "residual_in_fp32": False,
            **self.mixer_fields(model, mixer),
        }

    def read(self, fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
        """Implement `OneMixerFamily.read`."""
        fields.require("use_bias", False)
        fields.require("use_conv_bias", True)
        fields.require("hidden_act", "silu", "swish")
        model, mixer = self.read_mixer(fields)
        sizes = {
            "state_size": fields.positive_int("state_size"),
            "conv_kernel_size": fields.positive_int("conv_kernel"),
        }
        return {"norm_epsilon": fields.positive_number("layer_norm_epsilon"), **model}, sizes | mixer

    def layer_rules(self, model: ModelConfig) -> Iterator[Rule]:
        """Implement `OneMixerFamily.layer_rules`."""
        yield from self.norm_rules(model, "input_layernorm", "norm")


class MambaFamily(MambaModels):
    """Family of `MambaForCausalLM`.

    Its channels have no heads. Ours are grouped into heads for tensor parallelism.
    """

    architecture: str = "MambaForCausalLM"
    model_type: ClassVar[str] = "mamba"
    mixer: ClassVar[str] = "mamba"
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 768,
        "num_hidden_layers": 32,
        "vocab_size": 50280,
        "state_size": 16,
        "expand": 2,
        "conv_kernel": 4,
        "time_step_rank": "auto",
        "use_conv_bias": True,
        "use_bias": False,
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    }

    def width(self, model: ModelConfig, mixer: MambaConfig) -> int:
        """Implement `MambaModels.width`."""
        assert model.head_dim is not None
        return model.num_attention_heads * model.head_dim * mixer.expand

    def mixer_fields(self, model: ModelConfig, mixer: MambaConfig) -> dict[str, Any]:
        """Implement `MambaModels.mixer_fields`."""
        return {"time_step_rank": mixer.dt_rank or _rank(model.hidden_size)}

    def read_mixer(self, fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
        """Implement `MambaModels.read_mixer`."""
        hidden = fields.positive_int("hidden_size")
        head_dim = math.gcd(hidden, MAX_HEAD_DIM)
        # transformers always writes a number, never "auto".
        rank = None if fields["time_step_rank"] in ("auto", _rank(hidden)) else fields.positive_int("time_step_rank")
        heads = {"num_attention_heads": hidden // head_dim, "head_dim": head_dim}
        return heads, {"expand": fields.positive_int("expand"), "dt_rank": rank}

    def mixer_rules(self, model: ModelConfig, mixer: MambaConfig) -> Iterator[Rule]:
        """Implement `OneMixerFamily.mixer_rules`."""
        assert model.head_dim is not None
        heads, width = model.num_attention_heads, model.head_dim * mixer.expand
        yield reorder_rows_rule("in_proj.weight", "in_proj.weight", heads, {"x": width, "z": width}, "xz")
        # Ours is [heads, width, kernel], theirs [channels, 1, kernel] as in torch's grouped convolution.
        yield reshape_rule(
            "conv_weight",
            "conv1d.weight",
            lambda x: x.flatten(0, 1)[:, None],
            lambda x: x[:, 0].unflatten(0, (heads, -1)),
        )
        yield flatten_rule("conv_bias", "conv1d.bias", heads)
        yield reshape_rule(
            "x_proj",
            "x_proj.weight",
            lambda x: x.transpose(0, 1).flatten(1),
            lambda x: x.unflatten(1, (heads, -1)).transpose(0, 1),
        )
        yield flatten_rule("dt_proj", "dt_proj.weight", heads)
        yield flatten_rule("dt_bias", "dt_proj.bias", heads)
        yield flatten_rule("A_log", "A_log", heads)
        yield flatten_rule("D", "D", heads)
        yield rename_rule("out_proj.weight", "out_proj.weight")


def _rank(hidden_size: int) -> int:
    """Return the default rank: `time_step_rank` "auto" in transformers, `dt_rank` None in our configuration."""
    return -(-hidden_size // 16)
