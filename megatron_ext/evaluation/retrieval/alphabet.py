"""Tokens for tasks without text."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from megatron_ext.evaluation.retrieval.samples import Encode, Place, Unfit
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


def draw(rng: random.Random, alphabet: Sequence[int], count: int, place: Place) -> tuple[list[int], list[int]]:
    """Draw `count` distinct tokens; returns them and the remaining tokens of the alphabet.

    Raises:
        Unfit: no token would remain.
    """
    if count >= len(alphabet):
        raise Unfit(
            f"{place.task} needs more than {count} different tokens, but there are only {len(alphabet)} ordinary ones"
        )
    shuffled = rng.sample(list(alphabet), len(alphabet))
    return shuffled[:count], shuffled[count:]


def check_length(place: Place, shortest: int) -> None:
    """Raise `Unfit` if the place's length is below `shortest`, the minimum of the task."""
    if place.length < shortest:
        raise Unfit(f"the shortest sample takes {shortest} tokens")
