"""Functions that each rank of `test_language_model.py` runs: build a model, score texts and generate continuations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_ext.config.derive import derive
from megatron_ext.config.schema import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron_ext.evaluation.beams import Beams
from megatron_ext.evaluation.generation import Sampler
from megatron_ext.evaluation.language_model import ParallelTextModel
from megatron_ext.evaluation.text_model import Request, SamplingParameters, Score, TeacherForcedQuery
from megatron_ext.model.build import build_model
from megatron_ext.model.shape import model_shape
from megatron_ext.parallel.groups import make_process_groups
from megatron_ext.platform.device import select_platform

VOCABULARY = 61
END = 3
LENGTH = 64
MAX_TOKENS = 6
"""Largest number of tokens of a continuation."""


class Numbers:
    """Tokenizer whose texts are the token ids, written as characters."""

    end_id, size = END, VOCABULARY

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


def _chunks(
    parallel: dict[str, Any],
    precision: str,
    tied: bool,
    pattern: str = "attention,gated_deltanet,attention*2",
    mixers: dict[str, Any] | None = None,
    block: str = "transformer",
) -> tuple[list[Any], Any, Any]:
    config = derive(
        RunConfig(
            data=DataConfig(path="none", seq_length=LENGTH),
            # A large spread of initial weights makes the tokens' probabilities differ.
            model=ModelConfig(
                pattern=pattern,
                block=block,
                hidden_size=32,
                num_attention_heads=4,
                init_std=0.3,
                tie_embeddings=tied,
            ),
            mixers=mixers or {},
            parallel=ParallelConfig(**parallel),
            training=TrainingConfig(precision=precision, global_batch_size=12, micro_batch_size=3),
        )
    )
    platform = select_platform("cpu")
    groups = make_process_groups(config.parallel, 1)
    return build_model(model_shape(config, platform, VOCABULARY), platform, groups, seed=5), groups, platform


def ask(
    rank: int,
    world_size: int,
    parallel: dict[str, Any],
    requests: list[Request],
    prompts: list[list[int]],
    precision: str = "fp32",
    tied: bool = False,
) -> tuple[list[Score], list[list[int]]]:
    """Return scores, and continuations of at most MAX_TOKENS tokens that stop after a token above 50."""
    chunks, groups, platform = _chunks(parallel, precision, tied)
    model = ParallelTextModel(
        chunks, Numbers(), groups, platform, max_length=LENGTH, micro_batch_size=3, multiple=8 * world_size
    )
    scores = model.scores(requests)
    assert all(chunk.training for chunk in chunks)
    return scores, model.generate(prompts, MAX_TOKENS, lambda tokens: tokens[-1] > 50)


def foretell(
    rank: int, world_size: int, parallel: dict[str, Any], texts: list[TeacherForcedQuery], prompts: list[list[int]]
) -> tuple[list[int], int, list[list[int]], int]:
    """Return mispredicted tokens per text, continuations of MAX_TOKENS tokens, and the forward passes of both."""
    chunks, groups, platform = _chunks(parallel, "fp32", False)
    model = ParallelTextModel(
        chunks, Numbers(), groups, platform, max_length=LENGTH, micro_batch_size=3, multiple=8 * world_size
    )
    passes: list[int] = []
    chunks[0].register_forward_hook(lambda *_: passes.append(1))
    misses = model.misses(texts)
    reading = len(passes)
    return misses, reading, model.generate(prompts, MAX_TOKENS, lambda _: False), len(passes) - reading


def continue_with(
    rank: int,
    world_size: int,
    parallel: dict[str, Any],
    pattern: str,
    mixers: dict[str, Any],
    block: str,
    prompts: list[list[int]],
) -> tuple[list[list[int]], list[list[int]]]:
    """Return continuations of at most MAX_TOKENS tokens by greedy decoding and by a search with four beams."""
    chunks, groups, platform = _chunks(parallel, "fp32", False, pattern, mixers, block)
    model = ParallelTextModel(chunks, Numbers(), groups, platform, max_length=LENGTH, micro_batch_size=3, multiple=1)

    def is_done(tokens: Sequence[int]) -> bool:
        return tokens[-1] > 50

    return model.generate(prompts, MAX_TOKENS, is_done), model.generate(prompts, MAX_TOKENS, is_done, num_beams=4)


def searched_by_hand(rank: int, world_size: int, prompts: list[list[int]], *of_model: Any) -> list[list[int]]:
    """Run a search with four beams in one process that reads the whole text again for each token."""
    (model,), _, _ = _chunks({}, "fp32", False, *of_model)
    model.eval()
    found = []
    for prompt in prompts:
        beams, texts = Beams(4, MAX_TOKENS, END, lambda tokens: tokens[-1] > 50), [prompt] * 4
        while beams.is_open:
            positions_t = torch.arange(len(texts[0]))
            with torch.no_grad():
                logits_btv = model(torch.tensor(texts), positions_t.expand(4, -1), attention_mask=None)
            numbers, tokens = beams.advance(logits_btv[:, -1, :VOCABULARY])
            texts = [[*texts[number], token] for number, token in zip(numbers, tokens, strict=True)]
        found.append(beams.best)
    return found


def drawn(
    rank: int, world_size: int, parallel: dict[str, Any], prompts: list[list[int]], draws: list[SamplingParameters]
) -> list[list[int]]:
    """Return sampled continuations of at most MAX_TOKENS tokens that stop after a token above 50."""
    chunks, groups, platform = _chunks(parallel, "fp32", False)
    model = ParallelTextModel(chunks, Numbers(), groups, platform, max_length=LENGTH, micro_batch_size=3, multiple=1)
    return model.generate(prompts, MAX_TOKENS, lambda tokens: tokens[-1] > 50, draws)


def drawn_by_hand(
    rank: int, world_size: int, prompts: list[list[int]], draws: list[SamplingParameters]
) -> list[list[int]]:
    """Sample the same continuations in one process, token by token, from the logits of a full pass."""
    (model,), _, _ = _chunks({}, "fp32", False)
    model.eval()
    texts = []
    for prompt, draw in zip(prompts, draws, strict=True):
        sampler, text = Sampler(draw), []
        while len(text) < MAX_TOKENS and (not text or text[-1] <= 50):
            tokens = [*prompt, *text]
            with torch.no_grad():
                logits_btv = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], attention_mask=None)
            token = sampler(logits_btv[0, -1, :VOCABULARY])
            if token == END:
                break
            text.append(token)
        texts.append(text)
    return texts


def too_long(rank: int, world_size: int) -> list[str]:
    """Return the error messages for texts that are longer than the model's maximum length, or empty."""
    chunks, groups, platform = _chunks({}, "fp32", tied=False)
    model = ParallelTextModel(chunks, Numbers(), groups, platform, max_length=10, micro_batch_size=1, multiple=1)
    assert len(model.scores([Request([1] * 5, [2] * 6)])) == 1  # the last token is only scored, never read
    errors = []
    for call in (
        lambda: model.scores([Request([1] * 5, [2] * 7)]),
        lambda: model.generate([[1] * 5], 6, lambda _: False),
        lambda: model.scores([Request([], [2])]),
    ):
        try:
            call()
        except ValueError as error:
            errors.append(str(error))
    return errors


def by_hand(
    rank: int,
    world_size: int,
    requests: list[Request],
    prompts: list[list[int]],
    tied: bool = False,
    *of_model: Any,
) -> tuple[list[tuple[float, bool]], list[list[int]]]:
    """Compute scores and continuations in one process, token by token, with log-probabilities in float64."""
    (model,), _, _ = _chunks({}, "fp32", tied, *of_model)
    model.eval()

    def log_p(tokens: list[int]) -> torch.Tensor:
        tokens_bt = torch.tensor([tokens])
        with torch.no_grad():
            logits = model(tokens_bt, torch.arange(len(tokens))[None], attention_mask=None)[0, -1, :VOCABULARY]
        return logits.double().log_softmax(0)

    scores = []
    for request in requests:
        tokens, total, greedy = list(request.context), 0.0, True
        for token in request.continuation:
            found = log_p(tokens)
            total, greedy = total + float(found[token]), greedy and int(found.argmax()) == token
            tokens.append(token)
        scores.append((total, greedy))
    texts = []
    for prompt in prompts:
        text: list[int] = []
        while len(text) < MAX_TOKENS and (not text or text[-1] <= 50):
            token = int(log_p([*prompt, *text]).argmax())
            if token == END:
                break
            text.append(token)
        texts.append(text)
    return scores, texts
