"""Beam search, compared with `generate` of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import covering
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from megatron_ext.evaluation.beams import Beams

PROMPTS = [[5], [3, 1, 1, 2], [1, 2, 3, 4, 5, 4, 2]]
END = 0
LONGEST = 16
"""Largest number of tokens of a continuation."""


@pytest.fixture(scope="module", params=[30, 6])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    """Model with a vocabulary that is large relative to the number of beams, or one that the beams exhaust."""
    torch.manual_seed(request.param)
    config = LlamaConfig(
        vocab_size=request.param,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=END,
    )
    return LlamaForCausalLM(config).double().eval()  # float64, so that rounding decides no comparison


def ours(model: LlamaForCausalLM, prompt: list[int], num_beams: int, max_tokens: int, is_done: Any) -> list[int]:
    beams = Beams(num_beams, max_tokens, END, is_done)
    texts = [prompt] * num_beams
    while beams.is_open:
        with torch.no_grad():
            numbers, tokens = beams.advance(model(torch.tensor(texts)).logits[:, -1])
        texts = [[*texts[number], token] for number, token in zip(numbers, tokens, strict=True)]
    return beams.best


class Done(StoppingCriteria):
    """Stopping criterion like lm-eval's: it checks only the likeliest beam, and stops all beams with it."""

    def __init__(self, prompt: Sequence[int], is_done: Any) -> None:
        self._start, self._is_done = len(prompt), is_done

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return self._is_done(input_ids[0, self._start :].tolist())


def theirs(model: LlamaForCausalLM, prompt: list[int], num_beams: int, max_tokens: int, is_done: Any) -> list[int]:
    found = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=num_beams,
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=END,
        stopping_criteria=StoppingCriteriaList([Done(prompt, is_done)]),
    )
    text = found[0, len(prompt) :].tolist()
    return text[: text.index(END)] if END in text else text


@pytest.mark.parametrize(
    ("num_beams", "max_tokens"),
    covering.cases(
        every=product([2, 3, 10], [1, 2, 9, LONGEST]),
        default=[(3, 1), (10, 2), (2, 9), (3, LONGEST), (10, LONGEST)],
    ),
)
def test_the_search_is_that_of_transformers(model: LlamaForCausalLM, num_beams: int, max_tokens: int) -> None:
    for prompt in PROMPTS:
        for is_done in (
            lambda _: False,
            lambda text: text[-1] % 5 == 4,
            lambda text: len(text) > 3 and text[-2] % 5 == 2,
        ):
            expected = theirs(model, prompt, num_beams, max_tokens, is_done)
            assert ours(model, prompt, num_beams, max_tokens, is_done) == expected


def test_the_cases_tell_mistakes_apart(model: LlamaForCausalLM) -> None:
    """The prompts exercise end tokens, stop conditions, length limits, and an effect of the number of beams."""
    found = [[ours(model, prompt, n, LONGEST, lambda _: False) for prompt in PROMPTS] for n in (2, 3, 10)]
    lengths = {len(text) for texts in found for text in texts}
    assert len(lengths) > 1
    assert min(lengths) < LONGEST
    assert found[0] != found[2]
    assert found[2] != [ours(model, prompt, 10, LONGEST, lambda text: text[-1] % 5 == 4) for prompt in PROMPTS]
