"""Word lists from adjectives.txt and nouns.txt in this folder. No word contains another one.

A reference counts as found if it is a substring of the answer, so that a word inside another one would be a false
match. RULER takes its words from the package wonderwords, and for long lists from a larger English word list.
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
    """Return all `adjectives` or `nouns`, in alphabetical order."""
    file = resources.files("megatron_ext.evaluation.retrieval").joinpath(f"{kind}.txt")
    return tuple(file.read_text(encoding="utf-8").split())


def adjective_noun(rng: random.Random) -> str:
    """Draw an adjective and a noun in the format of RULER's keys, such as `brave-falcon`."""
    return f"{rng.choice(words('adjectives'))}-{rng.choice(words('nouns'))}"


def random_letters(rng: random.Random) -> str:
    """Draw six random lower-case letters."""
    return "".join(rng.choices(LETTERS, k=6))


class DistinctStrings:
    """Stream of distinct random strings. The first n do not depend on how many are requested.

    Args:
        draw: function that draws one string.
        rng: random generator passed to `draw`.
    """

    def __init__(self, draw: Callable[[random.Random], str], rng: random.Random) -> None:
        self._drawn: list[str] = []
        self._stream = self._draw(draw, rng)

    def __getitem__(self, index: int) -> str:
        self._drawn += islice(self._stream, max(0, index + 1 - len(self._drawn)))
        return self._drawn[index]

    def first(self, count: int) -> list[str]:
        """Return the first `count` strings."""
        return [self[index] for index in range(count)]

    @staticmethod
    def _draw(draw: Callable[[random.Random], str], rng: random.Random) -> Iterator[str]:
        seen = set()
        while True:
            text = draw(rng)
            if text not in seen:
                seen.add(text)
                yield text
