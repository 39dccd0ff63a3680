"""Multi-query associative recall, MQAR (Arora et al. 2023, arXiv 2312.04927, section 4 and appendix E)."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from megatron_ext.evaluation.retrieval.alphabet import check_length, draw
from megatron_ext.evaluation.retrieval.samples import Place, TokenSample

PAIRS = 16
POWER = 0.01
"""Exponent of the gap distribution: the probability of a gap g is proportional to g^(POWER - 1)."""


def make(place: Place, alphabet: Sequence[int]) -> TokenSample:
    """Build a sequence of key-value pairs, followed by every key once more with its value to predict.

    Keys, values and the tokens between the queries are disjoint sets, so that a key is always followed by its value.
    The paper draws the tokens in between from the whole vocabulary, or uses a blank. There is no example in the
    context, although a language model was not trained on such sequences.

    Raises:
        Unfit: the sequence is too short, or the alphabet is too small.
    """
    check_length(place, 4 * PAIRS)
    rng = place.random("sequence")
    drawn, between = draw(rng, alphabet, 2 * PAIRS, place)
    pairs = list(zip(drawn[:PAIRS], drawn[PAIRS:], strict=True))
    tokens = [token for pair in pairs for token in pair]
    tokens += rng.choices(between, k=place.length - len(tokens))
    starts = [2 * PAIRS + 2 * slot for slot in _slots(rng, (place.length - 2 * PAIRS) // 2)]
    for start, pair in zip(starts, pairs, strict=True):
        tokens[start : start + 2] = pair
    return TokenSample(place, tuple(tokens), tuple(sorted(start + 1 for start in starts)))


def _slots(rng: random.Random, count: int) -> list[int]:
    """Draw a slot of two tokens for each pair from the gap distribution, without replacement.

    The method is weighted reservoir sampling (Efraimidis & Spirakis 2006).
    """
    weights = {slot: (slot + 1) ** (POWER - 1) for slot in range(count)}
    return heapq.nlargest(PAIRS, weights, key=lambda slot: rng.random() ** (1 / weights[slot]))
