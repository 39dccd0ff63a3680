"""What tests of language need of a model: how likely it finds a text, and how it goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Request:
    """Tokens whose probability is asked for.

    Attributes:
        context: what stands before them, at least one token.
        continuation: the tokens, at least one.
    """

    context: Sequence[int]
    continuation: Sequence[int]


@dataclass(frozen=True)
class Foretelling:
    """A text, some of whose tokens are to be foretold.

    Attributes:
        tokens: of the whole text.
        asked: positions of the tokens to foretell, rising, at least one; none is the first.
    """

    tokens: Sequence[int]
    asked: Sequence[int]


@dataclass(frozen=True)
class Score:
    """How likely a continuation is.

    Attributes:
        log_probability: of all its tokens, in nats.
        is_greedy: whether each of them is the likeliest, the lowest token of equals.
    """

    log_probability: float
    is_greedy: bool


@dataclass(frozen=True)
class Draw:
    """How the tokens that go on a text are drawn.

    Attributes:
        identity: numbers that decide what is drawn, under any layout: two texts with the same ones draw alike.
        temperature: divides the logits, above 0.
        top_k: from so many likeliest tokens; None: from all.
        top_p: then from the fewest likeliest of them whose probabilities sum up to at least that, in (0, 1].
        min_p: then from those at least so likely, beside the likeliest one, in [0, 1].
    """

    identity: tuple[int, ...]
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0


class TextModel(Protocol):
    """A language model with its tokenizer, under any layout. Its calls are collective: every rank gives the same
    arguments and gets the same results.
    """

    @property
    def end_id(self) -> int:
        """Token that ends a document."""

    @property
    def max_length(self) -> int:
        """Tokens that a forward pass takes at most, those of a continuation but the last included."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones; the names of such tokens in it are text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""

    def scores(self, requests: Sequence[Request]) -> list[Score]:
        """Scores in the order of the requests.

        Raises:
            ValueError: a request is longer than `max_length` allows.
        """

    def misses(self, texts: Sequence[Foretelling]) -> list[int]:
        """How many of the tokens asked for are not the likeliest after all tokens before them (teacher forcing).

        A text is read once, whatever is asked of it.

        Raises:
            ValueError: a text is longer than `max_length` allows.
        """

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        is_done: Callable[[Sequence[int]], bool],
        draws: Sequence[Draw] | None = None,
        num_beams: int = 1,
    ) -> list[list[int]]:
        """The next tokens of each prompt, one after the other.

        Args:
            prompts: tokens, at least one each; with `max_tokens` they fit into `max_length`.
            max_tokens: how many at most.
            is_done: told what has been generated for a prompt after each token, whether that is enough.
            draws: how tokens are drawn, one for each prompt; None: the likeliest are taken (greedy).
            num_beams: more than one: the best text of a search with so many beams, without draws; see `Beams`.

        Returns:
            What follows each prompt: the end-of-document token ends it and is left out.
        """
