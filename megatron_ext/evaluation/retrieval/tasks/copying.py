"""Selective copying (Gu & Dao 2023, arXiv 2312.00752, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.evaluation.retrieval.alphabet import check_min_length, draw_tokens
from megatron_ext.evaluation.retrieval.registry import TokenTask, register
from megatron_ext.evaluation.retrieval.samples import SampleKey, TokenSample

NUM_COPIED = 16
VOCABULARY_SIZE = 14
"""Number of distinct tokens to copy; 16 with the blank and the mark."""


def build_sample(sample_key: SampleKey, alphabet: Sequence[int]) -> TokenSample:
    """Build a sequence of tokens at random positions between blanks, a mark, and the tokens in order without blanks.

    The tokens after the mark are predicted with teacher forcing; the paper's model gets marks as input instead. There
    is no example in the context, although a language model was not trained on such sequences.

    Raises:
        DoesNotFitError: the sequence is too short, or the alphabet is too small.
    """
    check_min_length(sample_key, 2 * NUM_COPIED + 1)
    rng = sample_key.random("sequence")
    (blank, mark, *vocabulary), _ = draw_tokens(rng, alphabet, VOCABULARY_SIZE + 2, sample_key)
    copied = rng.choices(vocabulary, k=NUM_COPIED)
    context = [blank] * (sample_key.length - NUM_COPIED - 1)
    for position, token in zip(sorted(rng.sample(range(len(context)), NUM_COPIED)), copied, strict=True):
        context[position] = token
    tokens = (*context, mark, *copied)
    return TokenSample(sample_key, tokens, tuple(range(sample_key.length - NUM_COPIED, sample_key.length)))


register("selective_copying", TokenTask(build_sample))
