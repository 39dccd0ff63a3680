"""Words of our own, from adjectives.txt and nouns.txt beside this file: no word holds another one.

RULER takes those of the package wonderwords, and for long lists a larger list of English words. Answers are looked for
as parts of what a model writes: a word inside another one would be found where it does not stand.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from itertools import islice

LETTERS = string.ascii_lowercase


@cache
def words(kind: str) -> tuple[str, ...]:
    """All `adjectives` or `nouns`, in the order of the alphabet."""
    file = resources.files("megatron_ext.evaluation.retrieval").joinpath(f"{kind}.txt")
    return tuple(file.read_text(encoding="utf-8").split())


def pair(rng: random.Random) -> str:
    """An adjective and a noun, as RULER's keys are: `brave-falcon`."""
    return f"{rng.choice(words('adjectives'))}-{rng.choice(words('nouns'))}"


def coded(rng: random.Random) -> str:
    """Six letters at random."""
    return "".join(rng.choices(LETTERS, k=6))


class Distinct:
    """A stream of things drawn at random, none of them twice; the first n are the same however many are asked for.

    Args:
        draw: makes one.
        rng: what it draws from.
    """

    def __init__(self, draw: Callable[[random.Random], str], rng: random.Random) -> None:
        self._found: list[str] = []
        self._stream = self._draw(draw, rng)

    def __getitem__(self, index: int) -> str:
        self._found += islice(self._stream, max(0, index + 1 - len(self._found)))
        return self._found[index]

    def first(self, count: int) -> list[str]:
        """The first `count` of them."""
        return [self[index] for index in range(count)]

    @staticmethod
    def _draw(draw: Callable[[random.Random], str], rng: random.Random) -> Iterator[str]:
        seen = set()
        while True:
            one = draw(rng)
            if one not in seen:
                seen.add(one)
                yield one
