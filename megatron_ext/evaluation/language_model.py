"""`TextModel` over a model and its tokenizer, under any parallel layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.evaluation.continuations import Continuations, IsDone
from megatron_ext.evaluation.next_tokens import NOTHING, NextTokens, Text
from megatron_ext.evaluation.text_model import Draw, Request, Score, TeacherForcedQuery
from megatron_ext.parallel.agreement import gather_values
from megatron_ext.platform.device import Platform


class TokenizerInterface(Protocol):
    """Tokenizer interface that `ParallelTextModel` requires."""

    @property
    def end_id(self) -> int:
        """Id of the end-of-document token."""

    @property
    def size(self) -> int:
        """Number of tokens in the vocabulary."""

    def encode(self, text: str) -> list[int]:
        """Tokenize a text without adding special tokens."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text."""


class ParallelTextModel:
    """Implementation of `TextModel` over the model chunks of this rank.

    Generation uses the decode cache of each layer. The prompts are divided over the ranks of the data-parallel and
    context-parallel groups, and each rank continues whole texts. The keys and values of 100k tokens take 20 GB in bf16
    with 24 layers and a hidden_size of 2,048, without grouped queries or tensor parallelism. Recurrent states take
    almost nothing.

    Args:
        chunks: model chunks of this rank, as `build_model` returns them.
        coder: tokenizer of the model.
        groups: process groups.
        platform: device and backend.
        max_length: maximum number of tokens of a forward pass.
        micro_batch_size: texts per forward pass.
        multiple: lengths are padded to a multiple of it; see `NextTokens`.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        coder: TokenizerInterface,
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
        """Id of the end-of-document token."""
        return self._coder.end_id

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a forward pass."""
        return self._max_length

    def encode(self, text: str) -> list[int]:
        """Tokenize a text without adding special tokens."""
        return self._coder.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text."""
        return self._coder.decode(tokens)

    def scores(self, requests: Sequence[Request]) -> list[Score]:
        """Implement `TextModel.scores`."""
        texts = [_text_of(request) for request in requests]
        for text in texts:
            self._check_length(len(text.tokens))
        answers = self._next_tokens(texts)
        return [
            Score(float(log_p), int(misses) == 0)
            for log_p, misses in zip(answers.log_probabilities, answers.misses, strict=True)
        ]

    def misses(self, texts: Sequence[TeacherForcedQuery]) -> list[int]:
        """Implement `TextModel.misses`."""
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
        """Implement `TextModel.generate`."""
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
            raise ValueError(f"{length} tokens exceed the {self._max_length} that the model supports")


def _text_of(request: Request) -> Text:
    if not request.context or not request.continuation:
        raise ValueError("a request needs a context and a continuation of at least one token each")
    tokens = [*request.context, *request.continuation]
    return Text(tokens[:-1], request.continuation)


def _with_targets(text: TeacherForcedQuery) -> Text:
    """Cut the text before its last asked token; targets are `NOTHING` at positions that are not asked for."""
    if not text.asked or text.asked[0] < 1:
        raise ValueError("a text needs at least two tokens")
    first, last = text.asked[0], text.asked[-1]
    targets = [NOTHING] * (last + 1 - first)
    for position in text.asked:
        targets[position - first] = text.tokens[position]
    return Text(text.tokens[:last], targets)
