"""Log-likelihoods and continuations of texts under every layout, compared with token-by-token decoding."""

from __future__ import annotations

import random
from typing import Any

import asked
import covering
import pytest

from megatron_ext.evaluation.text_model import Request, SamplingParameters, TeacherForcedQuery

pytestmark = pytest.mark.slow


def _tokens(draw: random.Random, shortest: int, longest: int) -> list[int]:
    return [draw.randrange(asked.VOCABULARY) for _ in range(draw.randint(shortest, longest))]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [_tokens(draw, 1, 50) for _ in range(7)]


LAYOUTS: dict[str, dict[str, Any] | None] = {
    "alone": None,
    "dp2": {},
    "tp2": {"tensor": 2, "sequence": False},
    "tp2_sp": {"tensor": 2, "sequence": True},
    "cp2": {"context": 2},
    "pp2": {"pipeline": 2},
    "pp2_interleaved": {"pipeline": 2, "virtual_pipeline": 2},
}
EVERY_LAYOUT = pytest.mark.parametrize("parallel", LAYOUTS.values(), ids=LAYOUTS)
# One variant each of tensor and pipeline parallelism: the later tests only depend on the results of a pass.
KINDS = {name: parallel for name, parallel in LAYOUTS.items() if name not in ("tp2", "pp2_interleaved")}
EVERY_KIND = pytest.mark.parametrize("parallel", KINDS.values(), ids=KINDS)


@pytest.fixture(scope="module")
def requests_and_expected(pool: Any, prompts: list[list[int]]) -> tuple[list[Request], Any]:
    """Requests of many lengths, some with greedy continuations, and their expected results."""
    draw = random.Random(8)
    requests = [Request(_tokens(draw, 1, 40), _tokens(draw, 1, 20)) for _ in range(8)]
    _, texts = pool.run(asked.by_hand, 1, [], prompts)[0]
    requests += [Request(prompt, text) for prompt, text in zip(prompts, texts, strict=True) if text]
    return requests, pool.run(asked.by_hand, 1, requests, prompts)[0]


@EVERY_LAYOUT
def test_every_layout_says_what_a_token_at_a_time_says(
    parallel: dict[str, Any] | None, requests_and_expected: tuple[list[Request], Any], prompts: Any, pool: Any
) -> None:
    requests, (expected, texts) = requests_and_expected
    ranks = pool.run(asked.ask, 1 if parallel is None else 2, parallel or {}, requests, prompts)
    assert all(answers == ranks[0] for answers in ranks)  # all ranks have the results
    scores, generated = ranks[0]
    assert [score.log_probability for score in scores] == pytest.approx([p for p, _ in expected], abs=2e-4, rel=1e-6)
    assert [score.is_greedy for score in scores] == [greedy for _, greedy in expected]
    assert generated == texts


def test_the_cases_tell_mistakes_apart(requests_and_expected: tuple[list[Request], Any]) -> None:
    requests, (expected, texts) = requests_and_expected
    assert {greedy for _, greedy in expected} == {True, False}
    assert len({len(text) for text in texts}) >= 3  # some end by end token, some by stop condition, some by length
    assert len({len(request.context) for request in requests}) > 10


@pytest.fixture(scope="module")
def texts_and_misses(pool: Any) -> tuple[list[TeacherForcedQuery], list[int]]:
    """Texts of different lengths with tokens to predict throughout, and the misses of token-by-token decoding."""
    draw = random.Random(9)
    whole = [_tokens(draw, 20, 60) for _ in range(7)]
    _, greedy = pool.run(asked.by_hand, 1, [], [text[:20] for text in whole])[0]
    whole = [[*text[:20], *more, *text[20:50]] for text, more in zip(whole, greedy, strict=True)]  # some are found
    texts = [TeacherForcedQuery(text, sorted(draw.sample(range(1, len(text)), 6))) for text in whole]
    requests = [Request(one.tokens[:at], [one.tokens[at]]) for one in texts for at in one.positions]
    right = [is_greedy for _, is_greedy in pool.run(asked.by_hand, 1, requests, [])[0][0]]
    return texts, [6 - sum(right[6 * number : 6 * number + 6]) for number in range(len(texts))]


@pytest.mark.parametrize("parallel", [None, {"tensor": 2, "sequence": True}, {"context": 2}, {"pipeline": 2}], ids=str)
def test_tokens_are_foretold_in_one_pass_a_text(
    parallel: dict[str, Any] | None, texts_and_misses: tuple[list[TeacherForcedQuery], list[int]], pool: Any
) -> None:
    texts, expected = texts_and_misses
    assert len(set(expected)) > 1
    misses, passes, _, _ = pool.run(asked.foretell, 1 if parallel is None else 2, parallel or {}, texts, [])[0]
    assert misses == expected
    # Seven texts, three per micro-batch. With PP, micro-batches are padded to a multiple of the number of stages.
    assert passes == (4 if parallel == {"pipeline": 2} else 3)


@pytest.fixture(scope="module")
def like_prompts_and_alone(pool: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[Any]]:
    """Prompts of similar length, and a model's continuation of each one alone."""
    some = [
        prompt[:length] for prompt, length in zip([one * 40 for one in prompts], [20, 23, 21, 20, 20, 22], strict=False)
    ]
    return some, [pool.run(asked.foretell, 1, {}, [], [prompt])[0] for prompt in some]


@EVERY_KIND
def test_prompts_of_like_lengths_are_continued_together(
    parallel: dict[str, Any] | None, like_prompts_and_alone: tuple[list[list[int]], list[Any]], pool: Any
) -> None:
    """Three prompts of the maximum length take the memory of six prompts with 32 tokens."""
    some, alone = like_prompts_and_alone
    world_size = 1 if parallel is None else 2
    _, _, together, passes = pool.run(asked.foretell, world_size, parallel or {}, [], some)[0]
    assert together == [texts[0] for _, _, texts, _ in alone]
    assert passes <= 1 + 3 + asked.MAX_TOKENS < sum(passes for *_, passes in alone)
    assert sum(map(len, together)) > 15


PP2 = {"pipeline": 2}
OTHERS = {
    "states": (
        "gated_deltanet,mamba2,mamba,retnet,rwkv6,rwkv7,gla,based",
        {"mamba2": {"state_size": 8}},
        "transformer",
    ),
    "blocks": (
        "nsa,moba,top1_chunk,top1_element",
        {
            "nsa": {"block_size": 4, "num_selected": 4, "window": 5},
            "moba": {"block_size": 4},
            "top1_chunk": {"chunk_size": 4},
        },
        "transformer",
    ),
    "shifted norms": ("attention,rwkv7,attention,gated_deltanet", {}, "rwkv7"),
}


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_every_mixer_remembers_under_every_layout(others: tuple[Any, ...], prompts: Any, pool: Any) -> None:
    """Greedy decoding and a search with four beams, in which a beam continues from another beam's decode cache.

    Pipeline stages handle caches in the same way for all mixers, so by default only one model has two stages.
    """
    prompts = [prompts[index] for index in (0, 2, 5, 6)]  # two micro-batches
    _, expected = pool.run(asked.by_hand, 1, [], prompts, False, *others)[0]
    searched = pool.run(asked.searched_by_hand, 1, prompts, *others)[0]
    assert len({tuple(text) for text in expected}) > 3
    assert sum(one != two for one, two in zip(expected, searched, strict=True)) >= 3
    layouts: list[dict[str, Any]] = [{"tensor": 2, "sequence": True}, {"context": 2}]
    for parallel in covering.cases([*layouts, PP2], [*layouts, PP2] if others is OTHERS["shifted norms"] else layouts):
        assert pool.run(asked.continue_with, 2, parallel, *others, prompts)[0] == (expected, searched), parallel


@pytest.fixture(scope="module")
def draws_and_texts(pool: Any, prompts: list[list[int]]) -> tuple[list[SamplingParameters], list[list[int]]]:
    """Samplers of several kinds in one batch, and the tokens sampled token by token."""
    shapes = [(1.0, None, 1.0, 0.0), (0.7, 20, 1.0, 0.0), (1.5, None, 0.9, 0.0), (1.2, 40, 0.95, 0.02)]
    sampling = [SamplingParameters((3, number), *shapes[number % 4]) for number in range(len(prompts))]
    return sampling, pool.run(asked.drawn_by_hand, 1, prompts, sampling)[0]


@EVERY_KIND
def test_every_layout_draws_what_is_drawn_a_token_at_a_time(
    parallel: dict[str, Any] | None, prompts: Any, draws_and_texts: tuple[list[SamplingParameters], Any], pool: Any
) -> None:
    sampling, expected = draws_and_texts
    ranks = pool.run(asked.drawn, 1 if parallel is None else 2, parallel or {}, prompts, sampling)
    assert all(texts == expected for texts in ranks)


def test_the_same_text_is_drawn_anew_for_another_identity(pool: Any) -> None:
    prompts = [[5, 6, 7]] * 6
    texts = pool.run(asked.drawn, 1, {}, prompts, [SamplingParameters((number,)) for number in (1, 2, 3, 4, 5, 1)])[0]
    assert len({tuple(text) for text in texts}) == 5
    assert texts[0] == texts[5]


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
    assert max(map(abs, a_token)) > 0  # not fp32, so there is some error


def test_what_is_too_long_or_empty_is_refused(pool: Any) -> None:
    assert pool.run(asked.too_long, 1)[0] == [
        "11 tokens exceed the 10 that the model supports",
        "11 tokens exceed the 10 that the model supports",
        "a request needs a context and a continuation of at least one token each",
    ]
