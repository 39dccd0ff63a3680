"""Selectron models and models of other libraries with equal weights: logits, and conversion both ways."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from family_cases import CASES, LENGTH, Case, family_of, saved
from torch import Tensor

from megatron_ext.conversion.core.family import Rule
from megatron_ext.platform.device import Platform

pytest.importorskip("transformers", reason="transformers is not installed")

CPU = Platform(torch.device("cpu"), "gloo")
Tensors = dict[str, Tensor]


def _to_theirs(rules: Iterable[Rule], ours: Tensors) -> Tensors:
    """Convert to their tensors. Each of ours must be used once, and each of theirs returned once."""
    remaining, theirs = dict(ours), {}
    for rule in rules:
        converted = rule.to_theirs([remaining.pop(name) for name in rule.ours])
        assert theirs.keys().isdisjoint(rule.theirs)
        theirs.update(zip(rule.theirs, converted, strict=True))
    assert not remaining
    return theirs


def _to_ours(rules: Iterable[Rule], theirs: Tensors) -> Tensors:
    """Convert to our tensors, with the same checks."""
    remaining, ours = dict(theirs), {}
    for rule in rules:
        converted = rule.to_ours([remaining.pop(name) for name in rule.theirs])
        assert ours.keys().isdisjoint(rule.ours)
        ours.update(zip(rule.ours, converted, strict=True))
    assert not remaining
    return ours


def _state(model: Any) -> Tensors:
    """Tensors of the model's file, which has no output layer if embeddings are tied."""
    tied = model.config.tie_word_embeddings
    return {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({torch.float32: torch.int32, torch.bfloat16: torch.int16}[x.dtype])


def _assert_same_bits(found: Tensors, expected: Tensors) -> None:
    assert {n: (x.shape, x.dtype) for n, x in found.items()} == {n: (x.shape, x.dtype) for n, x in expected.items()}
    assert [name for name, x in found.items() if not torch.equal(_bits(x), _bits(expected[name]))] == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_equal_those_of_their_model_with_our_weights(build: Any, peer: Any, tensors: Any, case: Case) -> None:
    shape, family = case.shape(CPU), family_of(case.mixer)
    ours, model = build(shape), saved(shape)
    assert family.unsupported_reason(model) is None
    theirs = peer(family.config(model))
    weights = _to_theirs(family.rules(model), tensors(shape, ours))
    assert {n: x.shape for n, x in _state(theirs).items()} == {n: x.shape for n, x in weights.items()}
    assert all(x.is_contiguous() for x in weights.values())
    theirs.load_state_dict(weights, strict=False)
    tokens = torch.randint(0, shape.vocab_size, (2, LENGTH - 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    found = ours(tokens, positions, attention_mask=None)[..., : shape.vocab_size].detach()
    expected = theirs(tokens, use_cache=False).logits.detach()
    assert float(expected.std()) > 0.1
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_round_trip_of_weights_is_bit_identical(build: Any, tensors: Any, case: Case, dtype: torch.dtype) -> None:
    shape = case.shape(CPU)
    rules = list(family_of(case.mixer).rules(saved(shape)))
    ours = {name: x.to(dtype) for name, x in tensors(shape, build(shape)).items()}
    ours["decoder.final_layernorm.weight"][:2] = torch.tensor([torch.nan, -0.0])
    theirs = _to_theirs(rules, ours)
    _assert_same_bits(_to_ours(rules, theirs), ours)
    _assert_same_bits(_to_theirs(rules, _to_ours(rules, theirs)), theirs)
    shapes = _to_ours(rules, _to_theirs(rules, {name: x.to("meta") for name, x in ours.items()}))
    assert {name: x.shape for name, x in shapes.items()} == {name: x.shape for name, x in ours.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_round_trip_of_the_config_is_lossless(peer: Any, case: Case) -> None:
    family, model = family_of(case.mixer), saved(case.shape(CPU))
    config = family.config(model)
    assert family.saved_model(config) == model
    given = json.loads(json.dumps(config, allow_nan=False))
    assert given == config
    # The config as their library writes it.
    written = json.loads(peer(given).config.to_json_string())
    assert family.config(family.saved_model(written)) == config
