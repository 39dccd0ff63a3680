"""Generation: which token comes next, one after the other, and their text as it grows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_ext.evaluation.decoding import Decoder
from megatron_ext.evaluation.text_model import Draw
from megatron_ext.parallel.parameters import generator_for

PROMPT_PIECE = 1024
"""Tokens of a prompt that are read at a time: logits of all of a long one would not fit in memory."""

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet."""

CONTEXT = 8
"""Tokens before the next ones that decide how these are written; a character has at most four bytes."""

Choose = Callable[[Tensor], int]
"""From the logits of the vocabulary [v] to a token."""


def greedy(logits_v: Tensor) -> int:
    """The likeliest token, the lowest one of equals."""
    return int(logits_v.argmax())


class Sampler:
    """Draws tokens; the same generator draws the same ones.

    `top_p` is the nucleus of Holtzman et al. 2020 (arXiv 1904.09751), `min_p` that of Nguyen et al. 2024 (arXiv
    2407.01082).

    Args:
        draw: how.
        generator: of random numbers, on the CPU; None: what `draw.identity` says.
    """

    def __init__(self, draw: Draw, generator: torch.Generator | None = None) -> None:
        self._draw = draw
        self._generator = generator_for(*draw.identity) if generator is None else generator

    def __call__(self, logits_v: Tensor) -> int:
        """Draw one token from the logits [v] of any floating dtype."""
        p_v, tokens_v = self.likeliest(logits_v)
        return int(tokens_v[torch.multinomial(p_v, 1, generator=self._generator)])

    def likeliest(self, logits_v: Tensor) -> tuple[Tensor, Tensor]:
        """Shares float64 [v] of which tokens are drawn, falling, and those tokens [v]; those left out have none."""
        # On the CPU, so that the same probabilities are the same draw on every machine.
        logits_v = logits_v.detach().to("cpu", torch.float64)
        below_best_v = logits_v - logits_v.max()  # so that no temperature, however low, makes an infinity of it
        p_v, tokens_v = (below_best_v / self._draw.temperature).softmax(-1).sort(descending=True, stable=True)
        if self._draw.top_k is not None and self._draw.top_k < len(p_v):
            p_v = p_v * (p_v >= p_v[self._draw.top_k - 1])  # with those that are as likely as the last one
        p_v = p_v / p_v.sum()
        taken_v = (p_v.cumsum(-1) - p_v < self._draw.top_p) & (p_v >= self._draw.min_p * p_v[0])
        return p_v * taken_v, tokens_v


def generate(
    decoder: Decoder, prompt: Tensor, *, vocab_size: int, max_tokens: int, end: int | None, choose: Choose
) -> Iterator[int]:
    """The tokens that follow a prompt, each as soon as it is chosen.

    Args:
        decoder: of a sequence not yet begun.
        prompt: its tokens, int64 [t] on the model's device, at least one.
        vocab_size: tokens to choose from; the model's vocabulary may be padded beyond it.
        max_tokens: how many at most.
        end: token that ends the text, and is not given; None: there is none.
        choose: takes one by its logits.
    """
    *earlier, tokens_bt = prompt[None].split(PROMPT_PIECE, dim=1)
    for piece_bt in earlier:
        decoder(piece_bt)
    for _ in range(max_tokens):
        token = choose(decoder(tokens_bt)[0, -1, :vocab_size])
        if token == end:
            return
        yield token
        tokens_bt = tokens_bt.new_tensor([[token]])


def text_of(tokens: Iterable[int], decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> Iterator[str]:
    """The text of tokens as they come; a character that several tokens share waits for the last of them.

    Args:
        tokens: in order.
        decode: a tokenizer's.
        before: tokens of the text before, which is not given.
    """
    ids = list(before[-CONTEXT:])
    known = len(decode(ids))
    for token in tokens:
        ids.append(token)
        text = decode(ids)
        if not text.endswith(REPLACEMENT):
            yield text[known:]
            ids = ids[-CONTEXT:]
            known = len(decode(ids))
    yield decode(ids)[known:]
