"""Model interface of the language tests: scores of continuations, prediction misses and generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Request:
    """Request for the probability of a continuation.

    Attributes:
        context: tokens before the continuation, at least one.
        continuation: tokens to score, at least one.
    """

    context: Sequence[int]
    continuation: Sequence[int]


@dataclass(frozen=True)
class TeacherForcedQuery:
    """Query for the model's predictions at some positions of a text.

    Attributes:
        tokens: tokens of the whole text.
        positions: positions of the tokens to predict, in ascending order, at least one. Position 0 is not allowed.
    """

    tokens: Sequence[int]
    positions: Sequence[int]


@dataclass(frozen=True)
class Score:
    """Score of a continuation.

    Attributes:
        log_probability: sum of the log-probabilities of the continuation's tokens, in nats.
        is_greedy: True if every token of the continuation is the model's most likely token. Among equally likely tokens
            the lowest id counts as the most likely.
    """

    log_probability: float
    is_greedy: bool


@dataclass(frozen=True)
class SamplingParameters:
    """Sampling parameters of a continuation.

    Attributes:
        identity: seed of the random generator, which determines the random numbers under any layout. Texts with the
            same identity use the same random numbers.
        temperature: divisor of the logits, above 0.
        top_k: number of most likely tokens to sample from; None: all tokens.
        top_p: probability mass in (0, 1] for nucleus sampling: the smallest set of most likely tokens that reaches this
            mass is sampled from.
        min_p: minimum probability relative to the most likely token, in [0, 1].
    """

    identity: tuple[int, ...]
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0


class TextModel(Protocol):
    """Language model with its tokenizer, under any parallel layout.

    The calls `scores`, `misses` and `generate` are collective: every rank passes the same arguments and gets the same
    results.
    """

    @property
    def end_id(self) -> int:
        """Id of the end-of-document token."""

    @property
    def max_length(self) -> int:
        """Maximum number of input tokens of a forward pass. The last token of a scored continuation is not an input."""

    def encode(self, text: str) -> list[int]:
        """Tokenize a text without adding special tokens. The text of a special token is tokenized as ordinary text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text."""

    def scores(self, requests: Sequence[Request]) -> list[Score]:
        """Return the scores of continuations in the order of the requests.

        Raises:
            ValueError: a request is longer than `max_length` allows.
        """

    def misses(self, texts: Sequence[TeacherForcedQuery]) -> list[int]:
        """Count the requested positions of each text at which the most likely token is not the text's token.

        Every prediction is conditioned on the text's own tokens before the position (teacher forcing). A text takes one
        forward pass, regardless of the number of positions.

        Returns:
            The number of wrong predictions of each text.

        Raises:
            ValueError: a text is longer than `max_length` allows.
        """

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        is_done: Callable[[Sequence[int]], bool],
        sampling: Sequence[SamplingParameters] | None = None,
        num_beams: int = 1,
    ) -> list[list[int]]:
        """Generate a continuation of each prompt.

        Args:
            prompts: tokens of each prompt, at least one. A prompt and `max_tokens` together fit into `max_length`.
            max_tokens: maximum number of tokens to generate per prompt.
            is_done: stopping criterion. It is called after each token with all tokens generated for a prompt, and
                returns True to stop.
            sampling: sampling parameters, one per prompt; None: greedy decoding.
            num_beams: number of beams of a beam search without sampling, see `Beams`; 1: no beam search.

        Returns:
            The generated tokens of each prompt. The end-of-document token stops generation and is not included.
        """
