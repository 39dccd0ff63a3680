"""Every mixer and block as transformers loads it: logits equal ours, with and without a cache, padded or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import cases
from hf_cases import CASES, MIXERS
from hf_converted import VOCABULARY, Converted, checkpoint_tensors
from torch import Tensor

from megatron_ext.conversion.core.tensors import FP32_PARAMETERS
from megatron_ext.conversion.huggingface.families.selectron import PARAMETERS, Selectron
from megatron_ext.mixers.core.settings import AttentionConfig

CHUNK_LENGTHS = [9, 1, 1, 30, 1, 20, *[1] * 10]
SELECTING = ("top1", "moba", "nsa")
GROWING = (*SELECTING, "attention")


FIRST_OF_PATTERN = {pattern: name for name, (pattern, *_) in reversed(CASES.items())}.values()
# By default, the first case of each mixer, and the cases of other blocks. Tests of logits, caches and padding use all.
ONE_OF_EACH = cases(
    every=CASES, default=[name for name, (_, _, sizes) in CASES.items() if name in FIRST_OF_PATTERN or "block" in sizes]
)


@pytest.fixture(scope="module", params=list(CASES))
def model(request: pytest.FixtureRequest, convert: Callable[..., Converted]) -> Converted:
    pattern, mixers, sizes = CASES[request.param]
    return convert(pattern, mixers, **sizes)


def _assert_near(found: Tensor, expected: Tensor, bound: float = 1e-5) -> None:
    assert float((found - expected).abs().max()) < bound * float(expected.abs().max())


def test_every_mixer_is_among_the_cases() -> None:
    assert {name for name, *_ in MIXERS} == set(PARAMETERS)


def test_logits_equal_ours(model: Converted, tokens: Tensor) -> None:
    with torch.no_grad():
        found = model.theirs(tokens).logits
    assert found.shape[-1] == VOCABULARY
    _assert_near(found, model.our_logits(tokens))


def test_tensors_equal_those_of_the_checkpoint(model: Converted) -> None:
    family = Selectron()
    rules = list(family.rules(model.saved))
    assert [rule.ours for rule in rules] == [rule.theirs for rule in rules]
    names = [name for rule in rules for name in rule.ours]
    stored = checkpoint_tensors(model.ours)
    assert sorted(names) == sorted(stored)
    theirs = {name: parameter.detach() for name, parameter in model.theirs.named_parameters()}
    assert {name: list(x.shape) for name, x in theirs.items()} == {name: list(x.shape) for name, x in stored.items()}
    assert all(torch.equal(theirs[name], stored[name]) for name in stored)


def test_the_configuration_describes_the_complete_model(model: Converted) -> None:
    family = Selectron()
    assert family.unsupported_reason(model.saved) is None
    config = family.config(model.saved)
    assert family.saved_model(config) == model.saved
    written = model.theirs.config.to_diff_dict()
    assert family.saved_model(written) == model.saved
    assert written["auto_map"] == config["auto_map"]


@torch.no_grad()
def test_chunks_with_a_cache_equal_the_whole_sequence(model: Converted, tokens: Tensor) -> None:
    """Mixers that select agree, too: no two of these scores are so close that rounding could change a choice."""
    expected, cache, found = model.theirs(tokens, use_cache=False), None, []
    assert expected.past_key_values is None
    for chunk in tokens.split(CHUNK_LENGTHS, 1):
        output = model.theirs(chunk, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    _assert_near(torch.cat(found, 1), expected.logits)
    assert cache.get_seq_length() == tokens.shape[1]


@torch.no_grad()
def test_cached_states_and_windows_do_not_grow(model: Converted, tokens: Tensor) -> None:
    def cached_bytes(count: int) -> list[int]:
        cache = model.theirs(tokens[:, :count], use_cache=True).past_key_values
        for token in tokens[:, count : count + 5].split(1, 1):
            model.theirs(token, past_key_values=cache)
        (group,) = cache.groups
        return [sum(x.untyped_storage().nbytes() for x in layer.tensors.values()) for layer in group.layers]

    few, many = cached_bytes(20), cached_bytes(40)
    assert min(few) > 0 or model.saved.mixers.get("attention") == AttentionConfig(window=1, temperature=0.5)
    for name, before, after in zip(model.saved.layers, few, many, strict=True):
        windowed = name == "attention" and model.saved.mixers[name].window is not None
        assert (after > before) == (name.startswith(GROWING) and not windowed), name


@torch.no_grad()
def test_left_padding_has_no_effect(model: Converted, tokens: Tensor) -> None:
    rows, ids, mask = [tokens[0, :30], tokens[1, :17], tokens[0, 30:47], tokens[1, :11]], [], []
    for row in rows:
        missing = 30 - len(row)
        ids.append(torch.cat([torch.full((missing,), 3), row]))
        mask.append(torch.cat([torch.zeros(missing, dtype=torch.long), torch.ones_like(row)]))
    ids_bt, mask_bt = torch.stack(ids), torch.stack(mask)
    padded_logits = model.theirs(ids_bt, attention_mask=mask_bt, use_cache=False).logits
    first = model.theirs(ids_bt[:, :22], attention_mask=mask_bt[:, :22], use_cache=True)
    rest = model.theirs(ids_bt[:, 22:], attention_mask=mask_bt, past_key_values=first.past_key_values)
    chunked = torch.cat([first.logits, rest.logits], 1)
    for i, row in enumerate(rows):
        alone = model.theirs(row[None], use_cache=False).logits[0]
        _assert_near(padded_logits[i, 30 - len(row) :], alone)
        _assert_near(chunked[i, 30 - len(row) :], alone)


@pytest.mark.parametrize("model", ONE_OF_EACH, indirect=True)
def test_generation_is_the_same_without_a_cache(model: Converted, tokens: Tensor) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": VOCABULARY - 1,
    }
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = 0
    for more in ({}, {"attention_mask": mask}):
        found = model.theirs.generate(tokens[:, :13], **options, **more)
        expected = model.theirs.generate(tokens[:, :13], **options, **more, use_cache=False)
        assert found.shape == (2, 19)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("model", ONE_OF_EACH, indirect=True)
@torch.no_grad()
def test_bf16_is_close_to_fp32(model: Converted, tokens: Tensor) -> None:
    """bf16 agrees up to rounding. A mixer that selects may choose differently, which changes the next layers."""
    from transformers import AutoModelForCausalLM

    rounded = AutoModelForCausalLM.from_pretrained(model.folder, trust_remote_code=True, dtype=torch.bfloat16)
    for name, parameter in rounded.named_parameters():
        assert parameter.dtype == (torch.float32 if name.rpartition(".")[-1] in FP32_PARAMETERS else torch.bfloat16), (
            name
        )
    first = rounded(tokens[:, :40], use_cache=True)
    rest = rounded(tokens[:, 40:], past_key_values=first.past_key_values)
    found, expected = torch.cat([first.logits, rest.logits], 1), model.theirs(tokens).logits
    assert found.dtype == torch.bfloat16
    selects = any(name.startswith(SELECTING) for name in model.saved.layers)
    assert float((found.float() - expected).norm() / expected.norm()) < (0.5 if selects else 0.05)
