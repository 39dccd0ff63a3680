"""Generation: sampling of tokens, their order, and streamed text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megatron_ext.evaluation import generation
from megatron_ext.evaluation.generation import Sampler, decode_stream, generate, greedy
from megatron_ext.evaluation.text_model import SamplingParameters

PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])


def _sampler(temperature: float, top_p: float, seed: int) -> Sampler:
    return Sampler(SamplingParameters((seed,), temperature, top_p=top_p))


def _shares(sampler: Sampler, logits: Tensor, draws: int = 4000) -> Tensor:
    """Return the share of all draws for each token."""
    counts = torch.bincount(torch.tensor([sampler(logits) for _ in range(draws)]), minlength=len(logits))
    return counts / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_of_the_logits_over_the_temperature(temperature: float) -> None:
    expected = PROBABILITIES ** (1 / temperature)
    found = _shares(_sampler(temperature, 1.0, seed=1), PROBABILITIES.log() + 3.0)
    torch.testing.assert_close(found, expected / expected.sum(), rtol=0, atol=0.03)  # four standard errors


@pytest.mark.parametrize(
    ("top_p", "nucleus"), [(0.001, [1]), (0.39, [1]), (0.41, [1, 3]), (0.72, [1, 3, 4]), (0.999, [0, 1, 2, 3, 4])]
)
def test_the_nucleus_is_the_fewest_tokens_that_reach_top_p(top_p: float, nucleus: list[int]) -> None:
    expected = torch.zeros(5)
    expected[nucleus] = PROBABILITIES[nucleus] / PROBABILITIES[nucleus].sum()
    found = _shares(_sampler(1.0, top_p, seed=2), PROBABILITIES.log())
    assert found.nonzero().flatten().tolist() == nucleus
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03)


def test_the_nucleus_is_taken_after_the_temperature() -> None:
    """The likeliest token has probability 0.16 / 0.285 = 0.56 at temperature 0.5."""
    assert _shares(_sampler(0.5, 0.5, seed=3), PROBABILITIES.log(), 100)[1] == 1.0
    assert _shares(_sampler(1.0, 0.5, seed=3), PROBABILITIES.log(), 100)[1] < 1.0


def test_a_seed_draws_the_same_tokens() -> None:
    first, again, other = (_sampler(1.0, 0.9, seed) for seed in (5, 5, 6))
    drawn = [[sampler(PROBABILITIES.log()) for _ in range(30)] for sampler in (first, again, other)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("top_k", [None, 1, 7, 40, 99])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 1.0])
@pytest.mark.parametrize(("temperature", "min_p"), [(1.0, 0.0), (0.6, 0.05), (1.7, 0.3)])
def test_tokens_are_left_out_as_transformers_does(
    temperature: float, top_k: int | None, top_p: float, min_p: float
) -> None:
    logits_v = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits_v[7] = logits_v[9]  # two equally likely tokens
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]
    scores_1v = logits_v[None].clone()
    for warp in warpers:
        scores_1v = warp(None, scores_1v)
    p_v, tokens_v = Sampler(SamplingParameters((1,), temperature, top_k, top_p, min_p)).sampling_weights(logits_v)
    found_v = torch.zeros_like(p_v).scatter(0, tokens_v, p_v / p_v.sum())
    torch.testing.assert_close(found_v, scores_1v[0].softmax(-1))
    assert 1 <= int((found_v > 0).sum()) <= 50


def test_what_is_drawn_is_a_function_of_all_numbers_of_the_identity() -> None:
    logits = torch.zeros(1000)
    drawn = {identity: Sampler(SamplingParameters(identity))(logits) for identity in [(1, 2), (2, 1), (12,), (1, 3)]}
    assert len(set(drawn.values())) == 4
    assert Sampler(SamplingParameters((2, 1)))(logits) == drawn[2, 1]


def test_next_to_no_temperature_is_greedy() -> None:
    assert {_sampler(5e-324, 1.0, seed)(PROBABILITIES.log()) for seed in range(9)} == {1}


def test_greedy_takes_the_likeliest() -> None:
    assert greedy(PROBABILITIES.log()) == 1
    assert greedy(torch.tensor([1.0, 3.0, 3.0]).bfloat16()) == 1


class Counting:
    """Stand-in for a decoder of 10 tokens in 16 rows. It predicts n + 1 after token n, and records its inputs."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def __call__(self, tokens_bt: Tensor) -> Tensor:
        self.given.append(tokens_bt[0].tolist())
        logits = torch.nn.functional.one_hot(tokens_bt + 1, 16).float()
        logits[..., 10:] = 9.0  # padding rows, which training never updates
        return logits


def _generated(decoder: Counting, prompt: list[int], max_tokens: int) -> list[int]:
    options: dict[str, Any] = {"vocab_size": 10, "end": 8, "choose": greedy}
    return list(generate(cast(Any, decoder), torch.tensor(prompt), max_tokens=max_tokens, **options))


def test_tokens_follow_one_another_up_to_the_limit() -> None:
    decoder = Counting()
    assert _generated(decoder, [7, 2], 3) == [3, 4, 5]
    assert decoder.given == [[7, 2], [3], [4]]  # the last token is never read


def test_the_end_is_not_given_and_ends_it() -> None:
    assert _generated(Counting(), [5], 9) == [6, 7]
    assert _generated(Counting(), [7], 9) == []


def test_a_long_prompt_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_PREFILL_TOKENS", 3)
    decoder = Counting()
    assert _generated(decoder, [0, 0, 0, 1, 1, 1, 2], 2) == [3, 4]
    assert decoder.given == [[0, 0, 0], [1, 1, 1], [2], [3]]


def _bytes(ids: Sequence[int]) -> str:
    """Decode tokens that are bytes."""
    return bytes(ids).decode("utf-8", errors="replace")


def _pieces(text: bytes, before: str = "") -> list[str]:
    return list(decode_stream(text, _bytes, list(before.encode())))


@pytest.mark.parametrize("before", ["", "a", "wie schön", "€" * 9])
def test_characters_of_several_tokens_come_whole(before: str) -> None:
    text = "für 3 € 🙂 und weiter, weiter, weiter"
    assert [piece for piece in _pieces(text.encode(), before) if piece] == list(text)


def test_bytes_that_are_no_character_do_not_hold_up_the_rest() -> None:
    pieces = _pieces(b"a\xffb\xc3")
    assert "".join(pieces) == "a\ufffdb\ufffd"
    assert pieces[:2] == ["a", "\ufffdb"]


def test_the_text_before_decides_how_a_token_is_written() -> None:
    """Some tokenizers write no space before the first word."""

    def decode(ids: Sequence[int]) -> str:
        return " ".join(f"word{i}" for i in ids)

    assert list(decode_stream([1, 2], decode, before=[0])) == [" word1", " word2", ""]
    assert list(decode_stream([1, 2], decode, before=[])) == ["word1", " word2", ""]
