"""How likely texts are and how they go on: as one token at a time says, under every layout."""

from __future__ import annotations

import random
from typing import Any

import asked
import pytest

from megatron_ext.evaluation.text_model import Request

pytestmark = pytest.mark.slow


def _tokens(draw: random.Random, shortest: int, longest: int) -> list[int]:
    return [draw.randrange(asked.VOCABULARY) for _ in range(draw.randint(shortest, longest))]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [_tokens(draw, 1, 50) for _ in range(11)]


@pytest.fixture(scope="module")
def requests_and_expected(pool: Any, prompts: list[list[int]]) -> tuple[list[Request], Any]:
    """Requests of all kinds of lengths, some of them greedy continuations."""
    draw = random.Random(8)
    requests = [Request(_tokens(draw, 1, 40), _tokens(draw, 1, 20)) for _ in range(14)]
    _, texts = pool.run(asked.by_hand, 1, [], prompts)[0]
    requests += [Request(prompt, text) for prompt, text in zip(prompts, texts, strict=True) if text]
    return requests, pool.run(asked.by_hand, 1, requests, prompts)[0]


@pytest.mark.parametrize(
    "parallel",
    [
        None,
        {},
        {"tensor": 2},
        {"tensor": 2, "sequence": True},
        {"context": 2},
        {"pipeline": 2},
        {"pipeline": 2, "virtual_pipeline": 2},
    ],
    ids=["alone", "dp2", "tp2", "tp2_sp", "cp2", "pp2", "pp2_interleaved"],
)
def test_every_layout_says_what_a_token_at_a_time_says(
    parallel: dict[str, Any] | None, requests_and_expected: tuple[list[Request], Any], prompts: Any, pool: Any
) -> None:
    requests, (expected, texts) = requests_and_expected
    ranks = pool.run(asked.ask, 1 if parallel is None else 2, parallel or {}, requests, prompts)
    assert all(answers == ranks[0] for answers in ranks)  # known on every rank
    scores, generated = ranks[0]
    assert [score.log_probability for score in scores] == pytest.approx([p for p, _ in expected], abs=2e-4, rel=1e-6)
    assert [score.is_greedy for score in scores] == [greedy for _, greedy in expected]
    assert generated == texts


def test_the_cases_tell_mistakes_apart(requests_and_expected: tuple[list[Request], Any]) -> None:
    requests, (expected, texts) = requests_and_expected
    assert {greedy for _, greedy in expected} == {True, False}
    assert len({len(text) for text in texts}) >= 3  # some end by themselves, some are stopped, some are cut
    assert len({len(request.context) for request in requests}) > 10


def test_a_tied_output_layer(
    pool: Any, prompts: list[list[int]], requests_and_expected: tuple[list[Request], Any]
) -> None:
    requests, _ = requests_and_expected
    expected, texts = pool.run(asked.by_hand, 1, requests, prompts, True)[0]
    scores, generated = pool.run(asked.ask, 2, {"pipeline": 2}, requests, prompts, "fp32", True)[0]
    assert [score.log_probability for score in scores] == pytest.approx([p for p, _ in expected], abs=2e-4, rel=1e-6)
    assert generated == texts


def test_bf16_is_near(pool: Any, prompts: list[list[int]], requests_and_expected: tuple[list[Request], Any]) -> None:
    requests, (expected, _) = requests_and_expected
    scores, _ = pool.run(asked.ask, 2, {"tensor": 2, "sequence": True}, requests, prompts, "bf16")[0]
    a_token = [
        (score.log_probability - p) / len(request.continuation)
        for request, score, (p, _) in zip(requests, scores, expected, strict=True)
    ]
    assert max(map(abs, a_token)) < 0.3
    assert max(map(abs, a_token)) > 0  # it is not fp32


def test_what_is_too_long_or_empty_is_refused(pool: Any) -> None:
    assert pool.run(asked.too_long, 1)[0] == [
        "11 tokens are more than the 10 that the model takes",
        "11 tokens are more than the 10 that the model takes",
        "a request needs a context and a continuation of a token each, at least",
    ]
