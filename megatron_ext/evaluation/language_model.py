"""A language model with its tokenizer, under any layout: the `TextModel` that tests of language are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.evaluation.continuations import Continuations, IsDone
from megatron_ext.evaluation.next_tokens import NOTHING, NextTokens, Text
from megatron_ext.evaluation.text_model import Draw, Foretelling, Request, Score
from megatron_ext.parallel.agreement import gather_values
from megatron_ext.platform import Platform


class Coder(Protocol):
    """What a language model needs of a tokenizer."""

    @property
    def end_id(self) -> int:
        """Token that ends a document."""

    @property
    def size(self) -> int:
        """Tokens there are."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""


class LanguageModel:
    """A `TextModel` over a model's chunks; see there for what its calls mean.

    It generates with what each layer remembers. Data-parallel ranks share the texts, and so do context-parallel ones,
    each of which continues whole texts: keys and values of 100k tokens take 20 GB in bf16 at 24 layers of 2,048
    features, without grouped queries or tensor parallelism, and states next to nothing.

    Args:
        chunks: of the model on this rank, see `build_model`.
        coder: its tokenizer.
        groups: process groups.
        platform: where this runs.
        max_length: tokens that a forward pass takes at most.
        micro_batch_size: texts a forward pass.
        multiple: see `NextTokens`.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        coder: Coder,
        groups: ProcessGroupCollection,
        platform: Platform,
        *,
        max_length: int,
        micro_batch_size: int,
        multiple: int,
    ) -> None:
        self._chunks, self._coder, self._groups, self._platform = list(chunks), coder, groups, platform
        self._max_length, self._micro_batch_size = max_length, micro_batch_size
        self._next_tokens = NextTokens(
            chunks,
            groups,
            platform,
            vocab_size=coder.size,
            micro_batch_size=micro_batch_size,
            multiple=multiple,
        )

    @property
    def end_id(self) -> int:
        """Token that ends a document."""
        return self._coder.end_id

    @property
    def max_length(self) -> int:
        """Tokens that a forward pass takes at most."""
        return self._max_length

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones."""
        return self._coder.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""
        return self._coder.decode(tokens)

    def scores(self, requests: Sequence[Request]) -> list[Score]:
        """How likely continuations are; see `TextModel`."""
        texts = [_text_of(request) for request in requests]
        for text in texts:
            self._check_length(len(text.tokens))
        answers = self._next_tokens(texts)
        return [
            Score(float(log_p), int(misses) == 0)
            for log_p, misses in zip(answers.log_probabilities, answers.misses, strict=True)
        ]

    def misses(self, texts: Sequence[Foretelling]) -> list[int]:
        """How many tokens the model does not foretell; see `TextModel`."""
        asked = [_with_targets(text) for text in texts]
        for text in asked:
            self._check_length(len(text.tokens))
        misses: list[int] = self._next_tokens(asked).misses.tolist()
        return misses

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        is_done: IsDone,
        draws: Sequence[Draw] | None = None,
        num_beams: int = 1,
    ) -> list[list[int]]:
        """Continuations, the likeliest or drawn; see `TextModel`."""
        for prompt in prompts:
            self._check_length(len(prompt) + max_tokens)
        write = Continuations(
            self._chunks,
            self._groups,
            self._platform.device,
            vocab_size=self._coder.size,
            tokens_at_a_time=self._micro_batch_size * self._max_length,
        )
        sharing = self._groups.dp_cp
        mine = slice(sharing.rank(), None, sharing.size())
        if num_beams > 1:
            own = write.best_of_beams(prompts[mine], max_tokens, self.end_id, is_done, num_beams)
        else:
            own = write(prompts[mine], max_tokens, self.end_id, is_done, None if draws is None else draws[mine])
        shares = gather_values(own, sharing)
        return [shares[number % sharing.size()][number // sharing.size()] for number in range(len(prompts))]

    def _check_length(self, length: int) -> None:
        if length > self._max_length:
            raise ValueError(f"{length} tokens are more than the {self._max_length} that the model takes")


def _text_of(request: Request) -> Text:
    if not request.context or not request.continuation:
        raise ValueError("a request needs a context and a continuation of a token each, at least")
    tokens = [*request.context, *request.continuation]
    return Text(tokens[:-1], request.continuation)


def _with_targets(text: Foretelling) -> Text:
    """The text up to its last token asked for, with `NOTHING` where none is asked for."""
    if not text.asked or text.asked[0] < 1:
        raise ValueError("a text needs a token to foretell, and one before it")
    first, last = text.asked[0], text.asked[-1]
    targets = [NOTHING] * (last + 1 - first)
    for position in text.asked:
        targets[position - first] = text.tokens[position]
    return Text(text.tokens[:last], targets)
