"""Blocks and norms around a mixer, compared with explicit formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers", minversion="5")
from megatron_ext.conversion.huggingface.selectron_hf.cache_selectron import EmptyHistory
from megatron_ext.conversion.huggingface.selectron_hf.configuration_selectron import SelectronConfig
from megatron_ext.conversion.huggingface.selectron_hf.mixer_selectron import Positions
from megatron_ext.conversion.huggingface.selectron_hf.modeling_selectron import SelectronForCausalLM

MIXERS = {"linear_attention": {"feature_map": "elu", "expand_v": 1, "output_gate": False}}


def _model(block: str, normalization: str) -> Any:
    config = SelectronConfig(
        layer_mixers=["linear_attention"] * 2,
        mixers=MIXERS,
        block=block,
        normalization=normalization,
        intermediate_size=None if block == "mixer" else 96,
    )
    model = SelectronForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def _normed(x: Tensor, norm: Any, normalization: str) -> Tensor:
    if normalization == "rms_norm":
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


@pytest.mark.parametrize("normalization", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("block", ["transformer", "rwkv7", "mixer"])
@torch.no_grad()
def test_blocks(block: str, normalization: str) -> None:
    model, tokens = _model(block, normalization), torch.arange(14).view(2, 7)

    def shifted(x: Tensor, norm: Any) -> Tensor:
        if block != "rwkv7":
            return _normed(x, norm, normalization)
        x = _normed(x, norm.norm, normalization)
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return x + (before - x) * norm.mu

    x = model.embedding.word_embeddings.weight[tokens]
    for layer in model.decoder.layers:
        mixed = shifted(x, layer.input_layernorm)
        x = x + layer.self_attention(mixed, EmptyHistory(), Positions(0, 7, model.config))
        if block == "mixer":
            assert {name for name, _ in layer.named_children()} == {"input_layernorm", "self_attention"}
            continue
        inner = shifted(x, layer.pre_mlp_layernorm) @ layer.mlp.linear_fc1.weight.T
        inner = F.silu(inner[..., :96]) * inner[..., 96:] if block == "transformer" else inner.clamp(min=0) ** 2
        x = x + inner @ layer.mlp.linear_fc2.weight.T
    expected = _normed(x, model.decoder.final_layernorm, normalization) @ model.output_layer.weight.T
    found = model(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
