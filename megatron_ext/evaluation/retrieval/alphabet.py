"""Tokens that tasks without text are made of."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from megatron_ext.evaluation.retrieval.samples import Encode, Place, Unfit
from megatron_ext.evaluation.retrieval.words import words


def ordinary_tokens(encode: Encode, end_id: int) -> tuple[int, ...]:
    """Tokens of our words and of single characters, in order, each once, without the one that ends a document.

    Of a whole vocabulary many tokens hardly occur in text, and rows of padding never: a model cannot tell such ones
    apart, whatever it is able to copy.
    """
    texts = [*string.ascii_letters, *string.digits, *string.punctuation]
    texts += [f" {word}" for kind in ("adjectives", "nouns") for word in words(kind)]
    return tuple(sorted({token for text in texts for token in encode(text)} - {end_id}))


def draw(rng: random.Random, alphabet: Sequence[int], count: int, place: Place) -> tuple[list[int], list[int]]:
    """`count` tokens, none of them twice, and those that are left.

    Raises:
        Unfit: none would be left.
    """
    if count >= len(alphabet):
        raise Unfit(f"{place.task} takes more than {count} different tokens, and ordinary ones are {len(alphabet)}")
    shuffled = rng.sample(list(alphabet), len(alphabet))
    return shuffled[:count], shuffled[count:]


def check_length(place: Place, shortest: int) -> None:
    """Raise `Unfit` for a length below the shortest that is the task."""
    if place.length < shortest:
        raise Unfit(f"the shortest one takes {shortest} tokens")
