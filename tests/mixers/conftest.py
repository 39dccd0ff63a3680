from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.transformer.spec_utils import build_module

from megatron_ext.config.derive import derive
from megatron_ext.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig
from megatron_ext.mixers.core.base import Mixer
from megatron_ext.model.build import transformer_config
from megatron_ext.model.shape import model_shape
from megatron_ext.model.specs import mixer_spec
from megatron_ext.platform.device import Platform

HIDDEN, HEADS = 24, 4


@pytest.fixture
def make_mixer(one_process: Any) -> Callable[..., Mixer]:
    """Function that builds a mixer for one process in fp32, with every weight drawn from a seed."""

    def make(
        name: str, *, groups: int = HEADS, heads: int = HEADS, layer_number: int = 1, layers: int = 1, **fields: Any
    ) -> Mixer:
        model = ModelConfig(
            pattern=f"{name}*{layers}",
            hidden_size=HIDDEN,
            num_attention_heads=heads,
            num_query_groups=groups,
            head_dim=6,
        )
        data, training = DataConfig(path="none", seq_length=16), TrainingConfig(precision="fp32")
        config = derive(RunConfig(data=data, model=model, mixers={name: fields}, training=training))
        cpu = Platform(torch.device("cpu"), "gloo")
        shape = model_shape(config, cpu, 100)
        mixer: Mixer = build_module(
            mixer_spec(name, shape.mixer_configs[name], "local"),
            config=transformer_config(shape, cpu),
            layer_number=layer_number,
            pg_collection=one_process,
        )
        generator = torch.Generator().manual_seed(7)
        for parameter in mixer.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.4, generator=generator)
        return mixer

    return make


@pytest.fixture
def hidden_states() -> torch.Tensor:
    """Hidden states [t, b, hidden] of odd length."""
    return torch.randn(13, 2, HIDDEN, generator=torch.Generator().manual_seed(11))
