"""Selective copying (Gu & Dao 2023, arXiv 2312.00752, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.evaluation.retrieval.alphabet import check_length, draw
from megatron_ext.evaluation.retrieval.samples import Place, TokenSample

MEMORIZED = 16
VOCABULARY = 14
"""Different tokens to copy; with the blank and the mark 16."""


def make(place: Place, alphabet: Sequence[int]) -> TokenSample:
    """Tokens at random places between blanks; after a mark they are to be repeated in order, without the blanks.

    Each is foretold with the right ones before it in sight, as a language model is trained; the paper's model sees
    marks instead. One that never trained on such sequences is tested without an example.

    Raises:
        Unfit: the sequence is too short, or ordinary tokens are too few.
    """
    check_length(place, 2 * MEMORIZED + 1)
    rng = place.random("sequence")
    (blank, mark, *vocabulary), _ = draw(rng, alphabet, VOCABULARY + 2, place)
    copied = rng.choices(vocabulary, k=MEMORIZED)
    context = [blank] * (place.length - MEMORIZED - 1)
    for position, token in zip(sorted(rng.sample(range(len(context)), MEMORIZED)), copied, strict=True):
        context[position] = token
    tokens = (*context, mark, *copied)
    return TokenSample(place, tokens, tuple(range(place.length - MEMORIZED, place.length)))
