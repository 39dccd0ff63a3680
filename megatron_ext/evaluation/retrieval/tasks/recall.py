"""Multi-query associative recall, MQAR (Arora et al. 2023, arXiv 2312.04927, section 4 and appendix E)."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from megatron_ext.evaluation.retrieval.alphabet import check_min_length, draw_tokens
from megatron_ext.evaluation.retrieval.registry import TokenTask, register
from megatron_ext.evaluation.retrieval.samples import SampleKey, TokenSample

NUM_PAIRS = 16
GAP_EXPONENT = 0.01
"""Exponent of the gap distribution: the probability of a gap g is proportional to g^(GAP_EXPONENT - 1)."""


def build_sample(sample_key: SampleKey, alphabet: Sequence[int]) -> TokenSample:
    """Build a sequence of key-value pairs, followed by every key once more with its value to predict.

    Keys, values and the tokens between the queries are disjoint sets, so that a key is always followed by its value.
    The paper draws the tokens in between from the whole vocabulary, or uses a blank. There is no example in the
    context, although a language model was not trained on such sequences.

    Raises:
        DoesNotFitError: the sequence is too short, or the alphabet is too small.
    """
    check_min_length(sample_key, 4 * NUM_PAIRS)
    rng = sample_key.random("sequence")
    drawn, fillers = draw_tokens(rng, alphabet, 2 * NUM_PAIRS, sample_key)
    pairs = list(zip(drawn[:NUM_PAIRS], drawn[NUM_PAIRS:], strict=True))
    tokens = [token for pair in pairs for token in pair]
    tokens += rng.choices(fillers, k=sample_key.length - len(tokens))
    starts = [2 * NUM_PAIRS + 2 * slot for slot in _slots(rng, (sample_key.length - 2 * NUM_PAIRS) // 2)]
    for start, pair in zip(starts, pairs, strict=True):
        tokens[start : start + 2] = pair
    return TokenSample(sample_key, tuple(tokens), tuple(sorted(start + 1 for start in starts)))


def _slots(rng: random.Random, count: int) -> list[int]:
    """Draw a slot of two tokens for each pair from the gap distribution, without replacement.

    The method is weighted reservoir sampling (Efraimidis & Spirakis 2006).
    """
    weights = {slot: (slot + 1) ** (GAP_EXPONENT - 1) for slot in range(count)}
    return heapq.nlargest(NUM_PAIRS, weights, key=lambda slot: rng.random() ** (1 / weights[slot]))


register("mqar", TokenTask(build_sample))
