"""Converted models on a GPU, compared with the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_cases import HYBRID, HYBRID_MIXERS, MIXERS

pytest.importorskip("transformers", minversion="5")
from megatron_ext.config.pattern import parse_pattern
from megatron_ext.conversion.huggingface.selectron_hf.configuration_selectron import SelectronConfig
from megatron_ext.conversion.huggingface.selectron_hf.modeling_selectron import SelectronForCausalLM
from megatron_ext.mixers.core.registry import load_all

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HYBRIDS: list[tuple[str, dict[str, Any]]] = [(HYBRID, HYBRID_MIXERS)]


@pytest.mark.parametrize(
    ("pattern", "mixers"), [(f"{name}*2", {name: settings}) for name, settings, _ in MIXERS] + HYBRIDS
)
@torch.no_grad()
def test_logits_and_generation_equal_those_on_the_cpu(pattern: str, mixers: dict[str, Any]) -> None:
    layers = parse_pattern(pattern)
    settings = {name: vars(load_all()[name].config_type(**mixers.get(name, {}))) for name in layers}
    settings = {name: {key: x for key, x in fields.items() if key[0] != "_"} for name, fields in settings.items()}
    torch.manual_seed(1)
    config = SelectronConfig(
        num_key_value_heads=2, layer_mixers=layers, mixers=settings, initializer_range=0.2, max_position_embeddings=99
    )
    model = SelectronForCausalLM(config).eval()
    tokens = torch.randint(0, 256, (2, 72))
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model(tokens, attention_mask=mask, use_cache=False).logits
    generated = model.generate(tokens, attention_mask=mask, **options)
    model.cuda()
    found = model(tokens.cuda(), attention_mask=mask.cuda(), use_cache=False).logits.cpu()
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    assert torch.equal(model.generate(tokens.cuda(), attention_mask=mask.cuda(), **options).cpu(), generated)
    rounded = model.bfloat16().generate(tokens.cuda(), attention_mask=mask.cuda(), **options)
    assert rounded.shape == generated.shape
