"""Conversion between Mamba-2 and transformers' `Mamba2ForCausalLM`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatron_ext.config.schema import ModelConfig
from megatron_ext.config.validate import show
from megatron_ext.conversion.core.family import Rule
from megatron_ext.conversion.huggingface.families.fields import Fields
from megatron_ext.conversion.huggingface.families.mamba import MambaModels
from megatron_ext.conversion.huggingface.families.tensors import (
    flatten_rule,
    rename_rule,
    reorder_rows_rule,
    transform_ours,
)
from megatron_ext.mixers.core.settings import Mamba2Config
from megatron_ext.utils.errors import UserError

PLAIN = Mamba2Config()

NO_LIMIT = [0.0, math.inf]
"""Value of `time_step_limit` without a limit. transformers writes infinity as an object, because JSON has none."""


class Mamba2Family(MambaModels):
    """Family of `Mamba2ForCausalLM`.

    Its groups are our query groups. Its `chunk_size` only affects how the model is computed.
    """

    architecture: str = "Mamba2ForCausalLM"
    model_type: ClassVar[str] = "mamba2"
    mixer: ClassVar[str] = "mamba2"
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "vocab_size": 32768,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "state_size": 128,
        "expand": 2,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": NO_LIMIT,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    }

    def width(self, model: ModelConfig, mixer: Mamba2Config) -> int:
        """Implement `MambaModels.width`."""
        assert model.head_dim is not None
        return model.num_attention_heads * model.head_dim * mixer.expand

    def unsupported_mixer_reason(self, model: ModelConfig, mixer: Mamba2Config) -> str | None:
        """Implement `OneMixerFamily.unsupported_mixer_reason`."""
        for name in ("convolution", "decay", "group_norm"):
            value, plain = getattr(mixer, name), getattr(PLAIN, name)
            if value != plain:
                return f"mixers.mamba2.{name} is {show(value)}, but the architecture fixes it at {show(plain)}"
        return super().unsupported_mixer_reason(model, mixer)

    def mixer_fields(self, model: ModelConfig, mixer: Mamba2Config) -> dict[str, Any]:
        """Implement `MambaModels.mixer_fields`."""
        assert model.head_dim is not None
        return {
            "num_heads": model.num_attention_heads,
            "head_dim": model.head_dim * mixer.expand,
            "n_groups": model.num_query_groups,
        }

    def read_mixer(self, fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
        """Implement `MambaModels.read_mixer`. Their `head_dim` is the width of a value: ours times `expand`."""
        fields.require("time_step_limit", NO_LIMIT, tuple(NO_LIMIT), [0.0, {"__float__": "Infinity"}])
        heads, head_dim, groups = (fields.positive_int(name) for name in ("num_heads", "head_dim", "n_groups"))
        fields.divide("num_heads", heads, "n_groups", groups)
        expand = fields.positive_int("expand")
        if fields.positive_int("hidden_size") * expand != heads * head_dim:
            problem = f"{expand} times hidden_size is not num_heads * head_dim = {heads * head_dim}"
            raise UserError("config.json: expand", problem, "correct the wrong field")
        expand = expand if head_dim % expand == 0 else 1
        model = {"num_attention_heads": heads, "num_query_groups": groups, "head_dim": head_dim // expand}
        return model, {"expand": expand}

    def mixer_rules(self, model: ModelConfig, mixer: Mamba2Config) -> Iterator[Rule]:
        """Implement `OneMixerFamily.mixer_rules`."""
        assert model.head_dim is not None
        assert model.num_query_groups is not None
        groups, size = model.num_query_groups, mixer.state_size
        heads = model.num_attention_heads // groups
        width = heads * model.head_dim * mixer.expand
        xbc = {"x": width, "B": size, "C": size}
        widths = xbc | {"z": width, "step": heads}
        yield reorder_rows_rule("in_proj.weight", "in_proj.weight", groups, widths, ("z", "x", "B", "C", "step"))
        # Theirs stores x of all groups, then B, then C. The weight is [channels, 1, kernel] as in torch's grouped
        # convolution.
        taps = reorder_rows_rule("conv_weight", "conv1d.weight", groups, xbc, "xBC")
        yield transform_ours(taps, lambda x: x.flatten(0, 1)[:, None], lambda x: x[:, 0].unflatten(0, (groups, -1)))
        biases = reorder_rows_rule("conv_bias", "conv1d.bias", groups, xbc, "xBC")
        yield transform_ours(biases, lambda x: x.flatten(), lambda x: x.unflatten(0, (groups, -1)))
        names = {"step_bias": "dt_bias", "log_decay": "A_log", "skip": "D", "group_norm_weight": "norm.weight"}
        for ours, theirs in names.items():
            yield flatten_rule(ours, theirs, groups)
        yield rename_rule("out_proj.weight", "out_proj.weight")
