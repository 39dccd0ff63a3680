"""Samples: where one stands, what one holds, and how one is fitted to a length."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_ext.evaluation.retrieval.haystack import Haystack
from megatron_ext.evaluation.retrieval.options import TaskName

Encode = Callable[[str], list[int]]
"""From a text to tokens, without special ones."""

FIRST_STEP = 8
"""Pieces of hay of the second try at a size."""

GUESSES = 12
"""Tries by interpolation; after them the interval is halved, which always ends."""


class Unfit(Exception):
    """A task does not fit into a length of the model's tokens."""


@dataclass(frozen=True)
class Place:
    """Which sample: with the tokenizer and the haystack, all that a sample is a function of.

    Attributes:
        task: its name.
        length: tokens, those that are generated included.
        depth: where the answer stands, from 0 to 1; None: the task has no one place.
        seed: of the whole test.
        index: of the sample at that place.
    """

    task: TaskName
    length: int
    depth: float | None
    seed: int
    index: int

    def random(self, purpose: str) -> random.Random:
        """A generator of this sample's own for one purpose; purposes do not disturb one another."""
        # A text is hashed with SHA-512, which is the same in every process and version, unlike `hash`.
        return random.Random(f"{self.task} {self.length} {self.depth} {self.seed} {self.index} {purpose}")


@dataclass(frozen=True)
class Material:
    """What samples are made of.

    Attributes:
        encode: the model's tokenizer.
        haystack: text between needles.
        alphabet: tokens that stand in ordinary text, for tasks without text, see `alphabet.py`.
    """

    encode: Encode
    haystack: Haystack
    alphabet: Sequence[int]


@dataclass(frozen=True)
class Draft:
    """A text sample but for its size. What is drawn at random is the same at every size, as far as it can be.

    Attributes:
        prompt: from the amount of hay, in pieces, to the whole prompt; the same amount gives the same prompt.
        references: what an answer must hold.
        smallest: pieces of hay below which it would not be the task.
        largest: pieces of hay that there are; None: as many as one likes.
    """

    prompt: Callable[[int], str]
    references: tuple[str, ...]
    smallest: int = 1
    largest: int | None = None


@dataclass(frozen=True)
class TextSample:
    """A prompt that the model goes on with.

    Attributes:
        place: which sample it is.
        text: the prompt.
        tokens: the same in tokens; with `max_tokens` they fit into the place's length.
        references: what an answer must hold.
        max_tokens: tokens to generate.
    """

    place: Place
    text: str = field(repr=False)
    tokens: tuple[int, ...] = field(repr=False)
    references: tuple[str, ...]
    max_tokens: int


@dataclass(frozen=True)
class TokenSample:
    """A sequence without text, some of whose tokens the model is to foretell from all tokens before them.

    Attributes:
        place: which sample it is.
        tokens: the sequence, as long as the place says.
        scored: positions of the tokens to foretell.
    """

    place: Place
    tokens: tuple[int, ...] = field(repr=False)
    scored: tuple[int, ...]


Sample = TextSample | TokenSample


def fit(draft: Draft, place: Place, encode: Encode, max_tokens: int) -> TextSample:
    """The draft with as much hay as its place's length has room for.

    Raises:
        Unfit: there is no room for the least hay.
    """
    found = shortest(draft, place, encode, max_tokens)
    size, tokens = _largest_size(draft, encode, found, place.length - max_tokens)
    return TextSample(place, draft.prompt(size), tuple(tokens), draft.references, max_tokens)


def shortest(draft: Draft, place: Place, encode: Encode, max_tokens: int) -> list[int]:
    """Tokens of the draft with the least hay.

    Raises:
        Unfit: its place's length has no room for them.
    """
    tokens = encode(draft.prompt(draft.smallest))
    if len(tokens) + max_tokens > place.length:
        raise Unfit(f"the shortest one takes {len(tokens) + max_tokens} tokens of this model")
    return tokens


def _largest_size(draft: Draft, encode: Encode, found: list[int], room: int) -> tuple[int, list[int]]:
    """The largest amount of hay that fits, with its tokens: binary search, its guesses by interpolation.

    A long prompt takes long to tokenise, and hay is of much the same density everywhere: a straight line through the
    last two sizes hits the mark in a few tries, where halving takes a dozen and more.
    """
    low = draft.smallest
    high = low + room + 1 if draft.largest is None else draft.largest + 1  # a piece is a token at least
    last, guess, tries = (low, len(found)), low + FIRST_STEP, 0
    while high - low > 1:
        size = min(max(guess, low + 1), high - 1)
        tokens = encode(draft.prompt(size))
        slope = max((len(tokens) - last[1]) / (size - last[0]), 1.0) if size != last[0] else 1.0
        last, tries = (size, len(tokens)), tries + 1
        if len(tokens) <= room:
            low, found = size, tokens
        else:
            high = size
        guess = size + int((room - len(tokens)) // slope) if tries < GUESSES else (low + high) // 2
    return low, found
