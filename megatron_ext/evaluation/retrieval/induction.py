"""Induction: what followed a token before follows it again (Olsson et al. 2022, arXiv 2209.11895)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.evaluation.retrieval.alphabet import check_length, draw
from megatron_ext.evaluation.retrieval.samples import Place, TokenSample

SEGMENT = 8


def make(place: Place, alphabet: Sequence[int]) -> TokenSample:
    """Random tokens, at a depth a segment that comes again at the end, where it is foretold but for its first token.

    The segment's tokens stand nowhere else, so that one token before tells where to look; the paper repeats the whole
    sequence. A language model that never trained on such sequences is tested without an example.

    Raises:
        Unfit: the sequence is too short, or ordinary tokens are too few.
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
