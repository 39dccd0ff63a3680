"""Selectron models that have a counterpart in another library, by its architecture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_ext.config.derive import derive
from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig
from megatron_ext.conversion.core.family import SavedModel
from megatron_ext.conversion.huggingface.families import FAMILIES
from megatron_ext.conversion.huggingface.families.one_mixer import OneMixerFamily
from megatron_ext.model.shape import ModelShape, model_shape
from megatron_ext.platform.device import Platform

VOCABULARY, LENGTH = 101, 32
NARROW = {"hidden_size": 24, "num_attention_heads": 4}
BLOCKS: dict[str, dict[str, Any]] = {
    "mamba": {"block": "mixer"},
    "mamba2": {"block": "mixer"},
    "rwkv7": {"block": "rwkv7", "normalization": "layer_norm"},
}


@dataclass(frozen=True)
class Case:
    """Model of one mixer, with sizes that differ from `NARROW` and with mixer settings."""

    mixer: str
    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.mixer, *(f"{k}={v}" for k, v in (self.model | self.settings).items())])

    def shape(self, cpu: Platform) -> ModelShape:
        """Return the shape of the model, in fp32."""
        sizes = {"pattern": f"{self.mixer}*2", **BLOCKS.get(self.mixer, {}), **NARROW, **self.model}
        model = ModelConfig(**sizes)
        data, training = DataConfig(path="none", seq_length=LENGTH), TrainingConfig(precision="fp32")
        config = derive(RunConfig(data=data, model=model, mixers={self.mixer: self.settings}, training=training))
        return model_shape(config, cpu, VOCABULARY)


def saved(shape: ModelShape) -> SavedModel:
    """Return the model as its checkpoint describes it."""
    return SavedModel(
        model=shape.model,
        layers=tuple(parse_pattern(shape.model.pattern)),
        mixers=dict(shape.mixer_configs),
        vocab_size=shape.vocab_size,
        seq_length=LENGTH,
    )


ONE_MIXER_FAMILIES = {name: family for name, family in FAMILIES.items() if isinstance(family, OneMixerFamily)}


def family_of(mixer: str) -> OneMixerFamily:
    """Return the family whose layers correspond to the mixer."""
    (family,) = [family for family in ONE_MIXER_FAMILIES.values() if family.mixer == mixer]
    return family


CASES = [
    Case("mamba"),
    Case(
        "mamba",
        {"num_attention_heads": 2, "head_dim": 12, "tie_embeddings": True, "norm_epsilon": 1e-3},
        {"state_size": 5, "expand": 1, "conv_kernel_size": 3, "dt_rank": 3},
    ),
    Case("mamba2", {}, {"state_size": 5}),
    Case("mamba2", {"num_query_groups": 2}, {"state_size": 5, "conv_kernel_size": 3}),
    Case("mamba2", {"num_query_groups": 1, "head_dim": 12, "tie_embeddings": True}, {"state_size": 5, "expand": 1}),
    Case("gla"),
    Case("gla", {"head_dim": 8, "ffn_hidden_size": 40, "tie_embeddings": True}, {"expand_v": 1, "output_gate": False}),
    Case("deltanet"),
    Case("deltanet", {"head_dim": 8}, {"expand_v": 2, "output_gate": True, "conv_kernel_size": 3}),
    Case("gated_deltanet", {"norm_epsilon": 1e-3}),
    Case("gated_deltanet", {"head_dim": 8}, {"expand_v": 2, "output_gate": False, "conv_kernel_size": 3}),
    Case(
        "nsa",
        {"num_attention_heads": 32, "num_query_groups": 2, "head_dim": 4, "rotary_base": 500.0},
        {"block_size": 4, "num_selected": 4, "window": 5},
    ),
    Case("rwkv7", {"pattern": "rwkv7*3"}),
    Case(
        "rwkv7",
        {"num_attention_heads": 2, "head_dim": 12, "ffn_hidden_size": 40, "tie_embeddings": True, "norm_epsilon": 1e-3},
        {"decay_rank": 2, "rate_rank": 3, "gate_rank": 4},
    ),
]
