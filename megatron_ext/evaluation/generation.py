"""Generation: which token comes next, one after the other, and their text as it grows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_ext.evaluation.decoding import Decoder

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
    """Draws tokens; the same seed draws the same ones.

    With `top_p` below 1 from the nucleus: the fewest likeliest tokens whose probabilities sum up to at least that
    (Holtzman et al. 2020, arXiv 1904.09751).

    Args:
        temperature: divides the logits, above 0.
        top_p: in (0, 1].
        seed: of the generator.
    """

    def __init__(self, temperature: float, top_p: float, seed: int) -> None:
        self._temperature, self._top_p = temperature, top_p
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits_v: Tensor) -> int:
        """Draw one token from the logits [v] of any floating dtype."""
        # On the CPU, so that the same probabilities are the same draw on every machine.
        logits_v = logits_v.detach().to("cpu", torch.float64)
        below_best_v = logits_v - logits_v.max()  # so that no temperature, however low, makes an infinity of it
        p_v, tokens_v = (below_best_v / self._temperature).softmax(-1).sort(descending=True, stable=True)
        in_nucleus_v = p_v.cumsum(-1) - p_v < self._top_p
        drawn = torch.multinomial(p_v * in_nucleus_v, 1, generator=self._generator)
        return int(tokens_v[drawn])


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
