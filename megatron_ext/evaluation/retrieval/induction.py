"""Induction task: a token is followed by the same token as before (Olsson et al. 2022, arXiv 2209.11895)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.evaluation.retrieval.alphabet import check_length, draw
from megatron_ext.evaluation.retrieval.samples import Place, TokenSample

SEGMENT = 8


def make(place: Place, alphabet: Sequence[int]) -> TokenSample:
    """Build random tokens with a segment at the place's depth and a copy of it at the end, to predict.

    The first token of the copy is not predicted. The segment's tokens occur nowhere else, so that the preceding token
    determines the answer. The paper repeats the whole sequence. There is no example in the context, although a
    language model was not trained on such sequences.

    Raises:
        Unfit: the sequence is too short, or the alphabet is too small.
    """
    assert place.depth is not None
    check_length(place, 2 * SEGMENT)
    rng = place.random("sequence")
    segment, others = draw(rng, alphabet, SEGMENT, place)
    free = place.length - 2 * SEGMENT
    hay = rng.choices(others, k=free)
    start = int(free * place.depth)
    tokens = (*hay[:start], *segment, *hay[start:], *segment)
    return TokenSample(place, tokens, tuple(range(place.length - SEGMENT + 1, place.length)))
