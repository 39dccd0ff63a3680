"""Greedy, sampled and beam-search continuations of prompts, with the decode cache of each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_ext.evaluation.beams import Beams
from megatron_ext.evaluation.decoding import with_decode_caches
from megatron_ext.evaluation.generation import Sampler
from megatron_ext.evaluation.next_tokens import OutputLayer, without_output_layer
from megatron_ext.evaluation.stages import Stages
from megatron_ext.evaluation.text_model import Draw
from megatron_ext.evaluation.vocabulary import Vocabulary
from megatron_ext.mixers.core.decode_cache import DecodeCache

PIECE = 8192
"""Maximum number of tokens in a prefill forward pass, over all prompts of a batch. Without the limit, the activations
of a layer for a long prompt would take gigabytes."""

IsDone = Callable[[Sequence[int]], bool]


class Continuations:
    """Batched generation for prompts of similar length.

    A prompt gets the same continuation as it would get alone. Prompts are not padded, because padding would change a
    recurrent state. Prefill covers the first n tokens of all prompts, where n is the length of the shortest prompt.
    Decoding then advances token by token: longer prompts consume their own tokens while shorter prompts already
    generate. Prompts are grouped by length, so that this adds at most `max_tokens` steps to a batch.

    Args:
        chunks: model chunks of this rank, as `build_model` returns them.
        groups: process groups. Tensor- and pipeline-parallel ranks must pass the same prompts.
        device: device of the model.
        vocab_size: number of tokens in the vocabulary. Padding rows of the output layer are ignored.
        tokens_at_a_time: maximum number of tokens of a batch, prompts and continuations together. A batch of a single
            prompt may exceed this maximum.
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

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        end: int,
        is_done: IsDone,
        draws: Sequence[Draw] | None = None,
    ) -> list[list[int]]:
        """Generate a continuation of each prompt, as in `TextModel.generate`.

        Args:
            prompts: tokens of each prompt, at least one.
            max_tokens: maximum number of tokens to generate per prompt.
            end: token that stops generation and is not included in the result.
            is_done: stopping criterion, called with all tokens generated so far for a prompt.
            draws: sampling parameters, one per prompt; None: greedy decoding.
        """
        found: dict[int, list[int]] = {}
        for numbers in self._batches([len(prompt) for prompt in prompts], max_tokens):
            samplers = [None if draws is None else Sampler(draws[number]) for number in numbers]
            texts = [_Text(prompts[number], max_tokens, own) for number, own in zip(numbers, samplers, strict=True)]
            self._continue(texts, end, is_done)
            found |= {number: text.found for number, text in zip(numbers, texts, strict=True)}
        return [found[number] for number in range(len(prompts))]

    def _batches(self, lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
        """Yield the indices of the prompts of each batch, longest prompt first."""
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

    @contextmanager
    def _begun(self) -> Iterator[tuple[OutputLayer | None, list[DecodeCache]]]:
        """Context manager with empty decode caches.

        Yields the output layer (None on ranks without an output layer) and the decode caches of this rank's layers.
        """
        with ExitStack() as stack:
            memories = [memory for chunk in self._chunks for memory in stack.enter_context(with_decode_caches(chunk))]
            yield stack.enter_context(without_output_layer(self._chunks)), memories

    def _continue(self, texts: Sequence[_Text], end: int, is_done: IsDone) -> None:
        at = min(len(text.prompt) for text in texts)
        with self._begun() as (output, _):
            hidden_tbh = self._read_on([text.prompt[:at] for text in texts])
            found = self._next(hidden_tbh, at, texts, output)
            while True:
                for text, token in zip(texts, found, strict=True):
                    text.take(token, at, end, is_done)
                if not any(text.is_open for text in texts):
                    return
                hidden_tbh = self._read_on([[text.token(at, end)] for text in texts], at)
                at += 1
                found = self._next(hidden_tbh, at, texts, output)

    def _read_on(self, texts: Sequence[Sequence[int]], start: int = 0) -> Tensor:
        """Run the model on the next tokens of each text, beginning at position `start`.

        Args:
            texts: next tokens of each text, equally many for all texts.
            start: position of the first of these tokens.

        Returns:
            The stage's output for the last tokens, [t, b, hidden_size]. If the pass was split into pieces of at most
            `PIECE` tokens, only the output for the last piece is returned.
        """
        tokens_bt = torch.tensor([list(text) for text in texts], device=self._device)
        for piece_bt in tokens_bt.split(max(1, PIECE // len(texts)), dim=1):
            b, t = piece_bt.shape
            positions_t = torch.arange(start, start + t, device=self._device)
            hidden_tbh = self._stages(piece_bt, positions_t.expand(b, -1))
            start += t
        return hidden_tbh

    def _next(self, hidden_tbh: Tensor, at: int, texts: Sequence[_Text], output: OutputLayer | None) -> list[int]:
        """Choose the token at position `at` of each text. For a text that does not generate there, it is unused."""
        chosen_b = torch.zeros(len(texts), dtype=torch.int64, device=self._device)
        if output is not None and texts[0].sampler is None:
            _, chosen_b = self._vocabulary.ask(hidden_tbh[-1], output.weight_vh, chosen_b)
        elif output is not None and any(text.wants(at) for text in texts):
            logits_bv = self._vocabulary.logits(hidden_tbh[-1], output.weight_vh)
            drawn = [text.draw(logits_bv[row]) if text.wants(at) else 0 for row, text in enumerate(texts)]
            chosen_b = chosen_b.new_tensor(drawn)
        tokens: list[int] = self._stages.said_by_last(chosen_b).tolist()
        return tokens

    def best_of_beams(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, end: int, is_done: IsDone, num_beams: int
    ) -> list[list[int]]:
        """Return the best continuation of each prompt by beam search; see `Beams`. Prompts are processed one by one."""
        return [self._search(prompt, Beams(num_beams, max_tokens, end, is_done)) for prompt in prompts]

    def _search(self, prompt: Sequence[int], beams: Beams) -> list[int]:
        at = len(prompt)
        with self._begun() as (output, memories):
            logits_1v = self._logits(self._read_on([prompt]), output)
            numbers, tokens = beams.advance(logits_1v.expand(beams.num_beams, -1))
            while beams.is_open:
                for memory in memories:
                    memory.select_sequences(torch.tensor(numbers, device=self._device))
                hidden_tbh = self._read_on([[token] for token in tokens], at)
                numbers, tokens = beams.advance(self._logits(hidden_tbh, output))
                at += 1
        return beams.best

    def _logits(self, hidden_tbh: Tensor, output: OutputLayer | None) -> Tensor:
        """Return the next-token logits, fp32 [b, v], on all pipeline stages, because every stage runs the search."""
        if output is None:
            logits_bv = torch.empty(hidden_tbh.shape[1], self._vocabulary.size, device=self._device)
        else:
            logits_bv = self._vocabulary.logits(hidden_tbh[-1], output.weight_vh).contiguous()
        return self._stages.said_by_last(logits_bv)


class _Text:
    """Prompt and the tokens generated for it so far."""

    def __init__(self, prompt: Sequence[int], max_tokens: int, sampler: Sampler | None) -> None:
        self.prompt, self._max_tokens, self.sampler = prompt, max_tokens, sampler
        self.found: list[int] = []
        self.is_open = True

    def wants(self, at: int) -> bool:
        """Return True if a token is generated at position `at`, i.e. after the prompt and while the text is open."""
        return self.is_open and at >= len(self.prompt)

    def draw(self, logits_v: Tensor) -> int:
        """Draw the next token from the logits [v]."""
        assert self.sampler is not None
        return self.sampler(logits_v)

    def take(self, token: int, at: int, end: int, is_done: IsDone) -> None:
        """Append the token chosen for a position, if the text generates there."""
        if not self.wants(at):
            return
        if token == end:
            self.is_open = False
            return
        self.found.append(token)
        self.is_open = len(self.found) < self._max_tokens and not is_done(self.found)

    def token(self, at: int, filler: int) -> int:
        """Return the token at position `at`, or `filler` after the end of the text."""
        if at < len(self.prompt):
            return self.prompt[at]
        place = at - len(self.prompt)
        return self.found[place] if place < len(self.found) else filler
