"""Selective copying (Gu & Dao 2023, arXiv 2312.00752, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.evaluation.retrieval.alphabet import check_length, draw
from megatron_ext.evaluation.retrieval.samples import Place, TokenSample

MEMORIZED = 16
VOCABULARY = 14
"""Number of distinct tokens to copy; 16 with the blank and the mark."""


def make(place: Place, alphabet: Sequence[int]) -> TokenSample:
    """Build a sequence of tokens at random positions between blanks, a mark, and the tokens in order without blanks.

    The tokens after the mark are predicted with teacher forcing; the paper's model gets marks as input instead. There
    is no example in the context, although a language model was not trained on such sequences.

    Raises:
        Unfit: the sequence is too short, or the alphabet is too small.
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
