"""The likeliest continuations of many texts at a time, with what each layer remembers of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_ext.evaluation.decoding import remembering
from megatron_ext.evaluation.next_tokens import OutputLayer, without_output_layer
from megatron_ext.evaluation.stages import Stages
from megatron_ext.evaluation.vocabulary import Vocabulary

PIECE = 8192
"""Tokens of all prompts together that are read at a time: a layer's activations of all of a long one take gigabytes."""

IsDone = Callable[[Sequence[int]], bool]


class Continuations:
    """Greedy generation for prompts of about the same length together, each as if it stood alone.

    There is no padding, which a mixer with a state would remember: prompts are read together as far as the shortest
    goes, then token by token, the longer ones their own tokens while the shorter ones are already continued. So they
    are grouped by length: the steps that this adds are at most as many as those that generate.

    Args:
        chunks: of the model on this rank, see `build_model`.
        groups: process groups; tensor- and pipeline-parallel ranks give the same prompts.
        device: of the model.
        vocab_size: tokens to choose from; rows of padding beyond it count for nothing.
        tokens_at_a_time: of all prompts of a batch with their continuations, at most; a single one may have more.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        groups: ProcessGroupCollection,
        device: torch.device,
        *,
        vocab_size: int,
        tokens_at_a_time: int,
    ) -> None:
        self._chunks, self._device = list(chunks), device
        self._stages = Stages(chunks, groups.pp)
        self._vocabulary = Vocabulary(vocab_size, groups.tp)
        self._tokens_at_a_time = tokens_at_a_time

    def __call__(self, prompts: Sequence[Sequence[int]], max_tokens: int, end: int, is_done: IsDone) -> list[list[int]]:
        """What follows each prompt, see `TextModel.generate`.

        Args:
            prompts: at least one token each.
            max_tokens: how many at most.
            end: token that ends a text, and is left out.
            is_done: told what has been generated for a prompt, whether that is enough.
        """
        found: dict[int, list[int]] = {}
        for numbers in self._batches([len(prompt) for prompt in prompts], max_tokens):
            texts = [_Text(prompts[number], max_tokens) for number in numbers]
            self._continue(texts, end, is_done)
            found |= {number: text.found for number, text in zip(numbers, texts, strict=True)}
        return [found[number] for number in range(len(prompts))]

    def _batches(self, lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
        """Numbers of prompts that are continued together, the longest first."""
        batch: list[int] = []
        for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
            longest = lengths[batch[0]] if batch else lengths[number]
            fits = (len(batch) + 1) * (longest + max_tokens) <= self._tokens_at_a_time
            if batch and not (fits and longest - lengths[number] <= max_tokens):
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    def _continue(self, texts: Sequence[_Text], end: int, is_done: IsDone) -> None:
        at = min(len(text.prompt) for text in texts)
        with ExitStack() as stack:
            for chunk in self._chunks:
                stack.enter_context(remembering(chunk))
            output = stack.enter_context(without_output_layer(self._chunks))
            likeliest = self._read_prompts([text.prompt[:at] for text in texts], output)
            while True:
                for text, token in zip(texts, likeliest, strict=True):
                    text.take(token, at, end, is_done)
                if not any(text.is_open for text in texts):
                    return
                tokens_b1 = torch.tensor([[text.token(at, end)] for text in texts], device=self._device)
                likeliest = self._next(tokens_b1, at, output)
                at += 1

    def _read_prompts(self, prompts: Sequence[Sequence[int]], output: OutputLayer | None) -> list[int]:
        tokens_bt = torch.tensor([list(prompt) for prompt in prompts], device=self._device)
        start, likeliest = 0, [0]
        for piece_bt in tokens_bt.split(max(1, PIECE // len(prompts)), dim=1):
            likeliest = self._next(piece_bt, start, output)
            start += piece_bt.shape[1]
        return likeliest

    def _next(self, tokens_bt: Tensor, start: int, output: OutputLayer | None) -> list[int]:
        """Read on from a position; the likeliest token after each text."""
        b, t = tokens_bt.shape
        positions_t = torch.arange(start, start + t, device=self._device)
        hidden_tbh = self._stages(tokens_bt, positions_t.expand(b, -1))
        best_b = tokens_bt.new_zeros(b)
        if output is not None:
            _, best_b = self._vocabulary.ask(hidden_tbh[-1], output.weight_vh, best_b)
        tokens: list[int] = self._stages.said_by_last(best_b).tolist()
        return tokens


class _Text:
    """A prompt and what has been found to follow it."""

    def __init__(self, prompt: Sequence[int], max_tokens: int) -> None:
        self.prompt, self._max_tokens = prompt, max_tokens
        self.found: list[int] = []
        self.is_open = True

    def take(self, token: int, at: int, end: int, is_done: IsDone) -> None:
        """Take the likeliest token at a position, if the prompt has ended before and the text has not."""
        if not self.is_open or at < len(self.prompt):
            return
        if token == end:
            self.is_open = False
            return
        self.found.append(token)
        self.is_open = len(self.found) < self._max_tokens and not is_done(self.found)

    def token(self, at: int, filler: int) -> int:
        """What stands at a position; the filler after the end."""
        if at < len(self.prompt):
            return self.prompt[at]
        place = at - len(self.prompt)
        return self.found[place] if place < len(self.found) else filler
