"""Token-by-token generation with greedy choice or sampling, and streaming of the text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_ext.evaluation.decoding import Decoder
from megatron_ext.evaluation.text_model import SamplingParameters
from megatron_ext.parallel.parameters import generator_for

MAX_PREFILL_TOKENS = 1024
"""Maximum prompt tokens of a prefill forward pass. The logits of a whole long prompt would not fit in memory."""

REPLACEMENT_CHARACTER = "\ufffd"
"""Replacement character, which a tokenizer's decoder writes for bytes that do not (yet) form a character."""

DECODE_CONTEXT = 8
"""Preceding tokens that are decoded together with new ones. They may affect the text of the new tokens: a character has
up to four bytes."""

Choose = Callable[[Tensor], int]
"""Function from logits [v] to a token."""


def greedy(logits_v: Tensor) -> int:
    """Return the most likely token; the lowest id among equally likely ones."""
    return int(logits_v.argmax())


class Sampler:
    """Sampler of tokens with temperature, top-k, top-p and min-p.

    `top_p` is the nucleus of Holtzman et al. 2020 (arXiv 1904.09751), `min_p` that of Nguyen et al. 2024 (arXiv
    2407.01082).

    Args:
        parameters: sampling parameters.
        generator: random generator on the CPU; None: one seeded with `parameters.identity`.
    """

    def __init__(self, parameters: SamplingParameters, generator: torch.Generator | None = None) -> None:
        self._parameters = parameters
        self._generator = generator_for(*parameters.identity) if generator is None else generator

    def __call__(self, logits_v: Tensor) -> int:
        """Draw one token from logits [v] of any floating-point dtype."""
        p_v, tokens_v = self.sampling_weights(logits_v)
        return int(tokens_v[torch.multinomial(p_v, 1, generator=self._generator)])

    def sampling_weights(self, logits_v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sampling weights of all tokens in descending order.

        Returns:
            Weights, float64 [v], not normalized: 0 for tokens that `top_k`, `top_p` or `min_p` exclude. And their
            tokens, int64 [v].
        """
        # On the CPU, so that equal probabilities give the same draw on every machine.
        logits_v = logits_v.detach().to("cpu", torch.float64)
        below_best_v = logits_v - logits_v.max()  # no overflow at a very low temperature
        p_v, tokens_v = (below_best_v / self._parameters.temperature).softmax(-1).sort(descending=True, stable=True)
        if self._parameters.top_k is not None and self._parameters.top_k < len(p_v):
            p_v = p_v * (p_v >= p_v[self._parameters.top_k - 1])  # ties with the k-th token stay
        p_v = p_v / p_v.sum()
        is_allowed_v = (p_v.cumsum(-1) - p_v < self._parameters.top_p) & (p_v >= self._parameters.min_p * p_v[0])
        return p_v * is_allowed_v, tokens_v


def generate(
    decoder: Decoder, prompt: Tensor, *, vocab_size: int, max_tokens: int, end: int | None, choose: Choose
) -> Iterator[int]:
    """Generate the continuation of a prompt, yielding each token as soon as it is chosen.

    Args:
        decoder: decoder of a new sequence.
        prompt: int64 [t] on the model's device, at least one token.
        vocab_size: number of tokens in the vocabulary; the logits may be padded beyond it.
        max_tokens: maximum number of tokens to generate.
        end: token that stops generation and is not yielded; None: there is none.
        choose: function from logits to a token, such as `greedy` or a `Sampler`.
    """
    *earlier, tokens_bt = prompt[None].split(MAX_PREFILL_TOKENS, dim=1)
    for chunk_bt in earlier:
        decoder(chunk_bt)
    for _ in range(max_tokens):
        token = choose(decoder(tokens_bt)[0, -1, :vocab_size])
        if token == end:
            return
        yield token
        tokens_bt = tokens_bt.new_tensor([[token]])


def decode_stream(
    tokens: Iterable[int], decode: Callable[[Sequence[int]], str], before: Sequence[int]
) -> Iterator[str]:
    """Decode a stream of tokens to pieces of text.

    A character that spans several tokens is yielded with the last of them.

    Args:
        tokens: tokens in order.
        decode: decode function of a tokenizer.
        before: preceding tokens, whose text is not yielded.
    """
    ids = list(before[-DECODE_CONTEXT:])
    yielded_length = len(decode(ids))
    for token in tokens:
        ids.append(token)
        text = decode(ids)
        if not text.endswith(REPLACEMENT_CHARACTER):
            yield text[yielded_length:]
            ids = ids[-DECODE_CONTEXT:]
            yielded_length = len(decode(ids))
    yield decode(ids)[yielded_length:]
