"""Induction task: a token is followed by the same token as before (Olsson et al. 2022, arXiv 2209.11895)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.evaluation.retrieval.alphabet import check_min_length, draw_tokens
from megatron_ext.evaluation.retrieval.registry import TokenTask, register
from megatron_ext.evaluation.retrieval.samples import SampleKey, TokenSample

SEGMENT_LENGTH = 8


def build_sample(sample_key: SampleKey, alphabet: Sequence[int]) -> TokenSample:
    """Build random tokens with a segment at the depth of the key and a copy of it at the end, to predict.

    The first token of the copy is not predicted. The segment's tokens occur nowhere else, so that the preceding token
    determines the answer. The paper repeats the whole sequence. There is no example in the context, although a
    language model was not trained on such sequences.

    Raises:
        DoesNotFitError: the sequence is too short, or the alphabet is too small.
    """
    assert sample_key.depth is not None
    check_min_length(sample_key, 2 * SEGMENT_LENGTH)
    rng = sample_key.random("sequence")
    segment, others = draw_tokens(rng, alphabet, SEGMENT_LENGTH, sample_key)
    num_filler = sample_key.length - 2 * SEGMENT_LENGTH
    filler = rng.choices(others, k=num_filler)
    start = int(num_filler * sample_key.depth)
    tokens = (*filler[:start], *segment, *filler[start:], *segment)
    return TokenSample(sample_key, tokens, tuple(range(sample_key.length - SEGMENT_LENGTH + 1, sample_key.length)))


register("induction", TokenTask(build_sample, has_depth=True))
