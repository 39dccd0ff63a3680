"""Tokens for tasks without text."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from megatron_ext.evaluation.retrieval.samples import DoesNotFitError, Encode, SampleKey
from megatron_ext.evaluation.retrieval.words import words


def ordinary_tokens(encode: Encode, end_id: int) -> tuple[int, ...]:
    """Return the distinct tokens of the word lists and of single characters, sorted, without the end-of-document token.

    Many tokens of a vocabulary hardly occur in text, and padded rows never do. A model cannot distinguish such tokens,
    however well it copies.

    Args:
        encode: encode function of the model's tokenizer.
        end_id: id of the end-of-document token.
    """
    texts = [*string.ascii_letters, *string.digits, *string.punctuation]
    texts += [f" {word}" for kind in ("adjectives", "nouns") for word in words(kind)]
    return tuple(sorted({token for text in texts for token in encode(text)} - {end_id}))


def draw_tokens(
    rng: random.Random, alphabet: Sequence[int], count: int, sample_key: SampleKey
) -> tuple[list[int], list[int]]:
    """Draw `count` distinct tokens, and return them and the remaining tokens of the alphabet.

    Raises:
        DoesNotFitError: no token would remain.
    """
    if count >= len(alphabet):
        raise DoesNotFitError(
            f"{sample_key.task} needs more than {count} different tokens, but only {len(alphabet)} are ordinary"
        )
    shuffled = rng.sample(list(alphabet), len(alphabet))
    return shuffled[:count], shuffled[count:]


def check_min_length(sample_key: SampleKey, min_length: int) -> None:
    """Raise `DoesNotFitError` if a sample is shorter than `min_length`, the minimum of its task in tokens."""
    if sample_key.length < min_length:
        raise DoesNotFitError(f"the shortest sample takes {min_length} tokens")
