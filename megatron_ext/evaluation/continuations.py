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
from megatron_ext.evaluation.text_model import SamplingParameters
from megatron_ext.evaluation.vocabulary import Vocabulary
from megatron_ext.mixers.core.decode_cache import DecodeCache

MAX_PREFILL_TOKENS = 8192
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
        sampling: Sequence[SamplingParameters] | None = None,
    ) -> list[list[int]]:
        """Generate a continuation of each prompt, as in `TextModel.generate`.

        Args:
            prompts: tokens of each prompt, at least one.
            max_tokens: maximum number of tokens to generate per prompt.
            end: token that stops generation and is not included in the result.
            is_done: stopping criterion, called with all tokens generated so far for a prompt.
            sampling: sampling parameters, one per prompt; None: greedy decoding.
        """
        continuations: dict[int, list[int]] = {}
        for indices in self._batches([len(prompt) for prompt in prompts], max_tokens):
            samplers = [None if sampling is None else Sampler(sampling[index]) for index in indices]
            texts = [
                _Text(prompts[index], max_tokens, sampler) for index, sampler in zip(indices, samplers, strict=True)
            ]
            self._generate(texts, end, is_done)
            continuations |= {index: text.generated for index, text in zip(indices, texts, strict=True)}
        return [continuations[index] for index in range(len(prompts))]

    def _batches(self, lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
        """Yield the indices of the prompts of each batch, longest prompt first."""
        batch: list[int] = []
        for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
            longest = lengths[batch[0]] if batch else lengths[index]
            fits = (len(batch) + 1) * (longest + max_tokens) <= self._tokens_at_a_time
            if batch and not (fits and longest - lengths[index] <= max_tokens):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    @contextmanager
    def _empty_caches(self) -> Iterator[tuple[OutputLayer | None, list[DecodeCache]]]:
        """Context manager with empty decode caches.

        Yields the output layer (None on ranks without an output layer) and the decode caches of this rank's layers.
        """
        with ExitStack() as stack:
            caches = [cache for chunk in self._chunks for cache in stack.enter_context(with_decode_caches(chunk))]
            yield stack.enter_context(without_output_layer(self._chunks)), caches

    def _generate(self, texts: Sequence[_Text], end: int, is_done: IsDone) -> None:
        position = min(len(text.prompt) for text in texts)
        with self._empty_caches() as (output, _):
            hidden_tbh = self._forward([text.prompt[:position] for text in texts])
            tokens = self._choose_next(hidden_tbh, position, texts, output)
            while True:
                for text, token in zip(texts, tokens, strict=True):
                    text.append(token, position, end, is_done)
                if not any(text.is_open for text in texts):
                    return
                hidden_tbh = self._forward([[text.token(position, end)] for text in texts], position)
                position += 1
                tokens = self._choose_next(hidden_tbh, position, texts, output)

    def _forward(self, texts: Sequence[Sequence[int]], start: int = 0) -> Tensor:
        """Run the model on the next tokens of each text, beginning at position `start`.

        Args:
            texts: next tokens of each text, equally many for all texts.
            start: position of the first of these tokens.

        Returns:
            The stage's output for the last tokens, [t, b, hidden_size]. If the pass was split into chunks of at most
            `MAX_PREFILL_TOKENS` tokens, only the output for the last chunk is returned.
        """
        tokens_bt = torch.tensor([list(text) for text in texts], device=self._device)
        for chunk_bt in tokens_bt.split(max(1, MAX_PREFILL_TOKENS // len(texts)), dim=1):
            b, t = chunk_bt.shape
            positions_t = torch.arange(start, start + t, device=self._device)
            hidden_tbh = self._stages(chunk_bt, positions_t.expand(b, -1))
            start += t
        return hidden_tbh

    def _choose_next(
        self, hidden_tbh: Tensor, position: int, texts: Sequence[_Text], output: OutputLayer | None
    ) -> list[int]:
        """Choose the token at a position of each text. It is unused for texts that do not generate there."""
        chosen_b = torch.zeros(len(texts), dtype=torch.int64, device=self._device)
        if output is not None and texts[0].sampler is None:
            _, chosen_b = self._vocabulary.score(hidden_tbh[-1], output.weight_vh, chosen_b)
        elif output is not None and any(text.generates_at(position) for text in texts):
            logits_bv = self._vocabulary.logits(hidden_tbh[-1], output.weight_vh)
            sampled = [
                text.draw(logits_bv[row]) if text.generates_at(position) else 0 for row, text in enumerate(texts)
            ]
            chosen_b = chosen_b.new_tensor(sampled)
        tokens: list[int] = self._stages.broadcast_from_last(chosen_b).tolist()
        return tokens

    def beam_search(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, end: int, is_done: IsDone, num_beams: int
    ) -> list[list[int]]:
        """Return the best continuation of each prompt by beam search; see `Beams`. Prompts are processed one by one."""
        return [self._search_beams(prompt, Beams(num_beams, max_tokens, end, is_done)) for prompt in prompts]

    def _search_beams(self, prompt: Sequence[int], beams: Beams) -> list[int]:
        position = len(prompt)
        with self._empty_caches() as (output, caches):
            logits_1v = self._logits(self._forward([prompt]), output)
            indices, tokens = beams.advance(logits_1v.expand(beams.num_beams, -1))
            while beams.is_open:
                for cache in caches:
                    cache.select_sequences(torch.tensor(indices, device=self._device))
                hidden_tbh = self._forward([[token] for token in tokens], position)
                indices, tokens = beams.advance(self._logits(hidden_tbh, output))
                position += 1
        return beams.best

    def _logits(self, hidden_tbh: Tensor, output: OutputLayer | None) -> Tensor:
        """Return the next-token logits, fp32 [b, v], on all pipeline stages, because every stage runs the search."""
        if output is None:
            logits_bv = torch.empty(hidden_tbh.shape[1], self._vocabulary.size, device=self._device)
        else:
            logits_bv = self._vocabulary.logits(hidden_tbh[-1], output.weight_vh).contiguous()
        return self._stages.broadcast_from_last(logits_bv)


class _Text:
    """Prompt and the tokens generated for it so far."""

    def __init__(self, prompt: Sequence[int], max_tokens: int, sampler: Sampler | None) -> None:
        self.prompt, self._max_tokens, self.sampler = prompt, max_tokens, sampler
        self.generated: list[int] = []
        self.is_open = True

    def generates_at(self, position: int) -> bool:
        """Return True if a token is generated at a position: after the prompt, while the text is open."""
        return self.is_open and position >= len(self.prompt)

    def draw(self, logits_v: Tensor) -> int:
        """Draw the next token from the logits [v]."""
        assert self.sampler is not None
        return self.sampler(logits_v)

    def append(self, token: int, position: int, end: int, is_done: IsDone) -> None:
        """Append the token chosen for a position, if the text generates there."""
        if not self.generates_at(position):
            return
        if token == end:
            self.is_open = False
            return
        self.generated.append(token)
        self.is_open = len(self.generated) < self._max_tokens and not is_done(self.generated)

    def token(self, position: int, filler: int) -> int:
        """Return the token at a position, or `filler` after the end of the text."""
        if position < len(self.prompt):
            return self.prompt[position]
        offset = position - len(self.prompt)
        return self.generated[offset] if offset < len(self.generated) else filler
