"""RWKV-7's block, compared with an explicit loop over tokens, and its initialization with flash-linear-attention."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.config.derive import derive
from megatron_ext.config.schema import DataConfig, ModelConfig, RunConfig
from megatron_ext.model.build import build_model
from megatron_ext.model.shape import model_shape
from megatron_ext.platform.device import Platform

CPU = Platform(torch.device("cpu"), "gloo")
HIDDEN, LENGTH = 32, 16


@pytest.fixture
def model(one_process: Any) -> Any:
    """Model of three layers in fp32. The mixer of the second has its own token shift."""
    sizes = ModelConfig(pattern="attention,rwkv7,attention", block="rwkv7", hidden_size=HIDDEN, num_attention_heads=4)
    config = derive(RunConfig(data=DataConfig(path="none", seq_length=LENGTH), model=sizes))
    shape = replace(model_shape(config, CPU, 100), precision="fp32")
    (chunk,) = build_model(shape, CPU, one_process, seed=3)
    return chunk


def test_losses_equal_reference_block(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("linear_fc2.weight", "out_proj.weight")):
                parameter.mul_(20)  # so that a layer's output is as large as its input
    tokens = torch.randint(0, 100, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(2, -1)
    losses = model(tokens[:, :-1], positions, attention_mask=None, labels=tokens[:, 1:])
    with torch.no_grad():
        x = model.embedding.word_embeddings.weight[tokens[:, :-1]].transpose(0, 1)
        for number, layer in enumerate(model.decoder.layers):
            norm = layer.input_layernorm
            y = _norm(x, norm.weight) if number == 1 else _shifted(_norm(x, norm.norm.weight), norm.mu)
            x = x + layer.self_attention(y)[0]
            y = _shifted(_norm(x, layer.pre_mlp_layernorm.norm.weight), layer.pre_mlp_layernorm.mu)
            x = x + (y @ layer.mlp.linear_fc1.weight.T).clamp(min=0).square() @ layer.mlp.linear_fc2.weight.T
        logits = _norm(x, model.decoder.final_layernorm.weight) @ model.output_layer.weight[:100].T
        expected = torch.nn.functional.cross_entropy(
            logits.transpose(0, 1).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        ).view(2, LENGTH)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _shifted(x_tbh: Tensor, mu: Tensor) -> Tensor:
    rows = []
    for t in range(len(x_tbh)):
        before = x_tbh[t - 1] if t else torch.zeros_like(x_tbh[0])
        rows.append((1 - mu) * x_tbh[t] + mu * before)
    return torch.stack(rows)


def test_channel_mix_initialization(model: Any) -> None:
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    theirs = import_module("fla.models.rwkv7.modeling_rwkv7").RWKV7FeedForward
    for number, layer in enumerate(model.decoder.layers):
        expected = theirs(HIDDEN, layer_idx=number, num_hidden_layers=3)
        assert layer.mlp.linear_fc1.weight.shape == expected.key.weight.shape
        torch.testing.assert_close(layer.pre_mlp_layernorm.mu, expected.x_k, rtol=1e-5, atol=1e-6)


def test_token_shift_initialization_of_other_mixer(model: Any) -> None:
    for number in (0, 2):
        mu = [1 - (c / HIDDEN) ** (0.7 * (1 - number / 3)) for c in range(HIDDEN)]
        assert model.decoder.layers[number].input_layernorm.mu.tolist() == pytest.approx(mu, abs=1e-6)
