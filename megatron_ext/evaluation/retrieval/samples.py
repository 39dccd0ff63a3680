"""Samples of retrieval tasks and their fit to a length in tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_ext.evaluation.retrieval.haystack import Haystack

Encode = Callable[[str], list[int]]
"""Function that tokenizes a text without special tokens."""

FIRST_INCREMENT = 8
"""Number of segments of hay by which the second size that is tried exceeds the minimum."""

MAX_INTERPOLATIONS = 12
"""Maximum number of tries by interpolation. The search then continues by bisection, which always terminates."""


class DoesNotFitError(Exception):
    """Exception for a task that does not fit into a length in tokens of the model."""


@dataclass(frozen=True)
class SampleKey:
    """Key of a sample, which determines the sample together with the tokenizer and the haystack.

    Attributes:
        task: name of the task.
        length: length in tokens, including generated tokens.
        depth: relative position of the answer in the context, from 0 to 1; None: the task has no depth.
        seed: seed of the whole test.
        index: index of the sample among those of the same task, length and depth.
    """

    task: str
    length: int
    depth: float | None
    seed: int
    index: int

    def random(self, purpose: str) -> random.Random:
        """Return a random generator for this sample and purpose; different purposes are independent."""
        # `Random` hashes a text with SHA-512. In contrast to `hash`, the result is equal in every process and version.
        return random.Random(f"{self.task} {self.length} {self.depth} {self.seed} {self.index} {purpose}")


@dataclass(frozen=True)
class SampleInputs:
    """Inputs from which samples are built.

    Attributes:
        encode: encode function of the model's tokenizer.
        haystack: text in which needles are hidden.
        alphabet: tokens that occur in ordinary text, for tasks without text; see `ordinary_tokens`.
    """

    encode: Encode
    haystack: Haystack
    alphabet: Sequence[int]


@dataclass(frozen=True)
class Draft:
    """Text sample whose amount of hay is not fixed yet. Random choices are equal at every size, as far as possible.

    Attributes:
        prompt: deterministic function from the number of segments of hay to the whole prompt.
        references: texts that an answer must contain.
        min_size: minimum number of segments of hay of a valid sample.
        max_size: maximum number of segments of hay; None: unlimited.
    """

    prompt: Callable[[int], str]
    references: tuple[str, ...]
    min_size: int = 1
    max_size: int | None = None


@dataclass(frozen=True)
class TextSample:
    """Prompt for the model to continue.

    Attributes:
        key: key of the sample.
        text: the prompt.
        tokens: tokens of the prompt. Their number plus `max_tokens` is at most `key.length`.
        references: texts that an answer must contain.
        max_tokens: maximum number of tokens to generate.
    """

    key: SampleKey
    text: str = field(repr=False)
    tokens: tuple[int, ...] = field(repr=False)
    references: tuple[str, ...]
    max_tokens: int


@dataclass(frozen=True)
class TokenSample:
    """Token sequence in which the model predicts some tokens from all tokens before them.

    Attributes:
        key: key of the sample.
        tokens: the sequence, `key.length` tokens.
        scored: positions of the tokens to predict, in ascending order.
    """

    key: SampleKey
    tokens: tuple[int, ...] = field(repr=False)
    scored: tuple[int, ...]


Sample = TextSample | TokenSample


def fit(draft: Draft, sample_key: SampleKey, encode: Encode, max_tokens: int) -> TextSample:
    """Build the sample with as much hay as fits into `sample_key.length`.

    Args:
        draft: sample whose amount of hay is not fixed yet.
        sample_key: key of the sample.
        encode: encode function of the model's tokenizer.
        max_tokens: tokens reserved for the answer.

    Raises:
        DoesNotFitError: even the smallest amount of hay does not fit.
    """
    shortest_tokens = encode_shortest(draft, sample_key, encode, max_tokens)
    size, tokens = _max_fitting_size(draft, encode, shortest_tokens, sample_key.length - max_tokens)
    return TextSample(sample_key, draft.prompt(size), tuple(tokens), draft.references, max_tokens)


def encode_shortest(draft: Draft, sample_key: SampleKey, encode: Encode, max_tokens: int) -> list[int]:
    """Return the tokens of the prompt with the smallest amount of hay.

    Raises:
        DoesNotFitError: the tokens plus `max_tokens` exceed `sample_key.length`.
    """
    tokens = encode(draft.prompt(draft.min_size))
    if len(tokens) + max_tokens > sample_key.length:
        raise DoesNotFitError(f"the shortest sample takes {len(tokens) + max_tokens} tokens of this model")
    return tokens


def _max_fitting_size(
    draft: Draft, encode: Encode, shortest_tokens: list[int], max_prompt_tokens: int
) -> tuple[int, list[int]]:
    """Return the largest amount of hay that fits, with its tokens, by an interpolating search.

    Tokenizing a long prompt is slow. The number of tokens grows about linearly with the amount of hay, so that linear
    interpolation through the last two sizes takes a few tries. Bisection would take a dozen or more.
    """
    low, low_tokens = draft.min_size, shortest_tokens
    # A segment has at least one token, so that more segments than tokens cannot fit.
    high = low + max_prompt_tokens + 1 if draft.max_size is None else draft.max_size + 1
    last, guess, num_tries = (low, len(low_tokens)), low + FIRST_INCREMENT, 0
    while high - low > 1:
        size = min(max(guess, low + 1), high - 1)
        tokens = encode(draft.prompt(size))
        slope = max((len(tokens) - last[1]) / (size - last[0]), 1.0) if size != last[0] else 1.0
        last, num_tries = (size, len(tokens)), num_tries + 1
        if len(tokens) <= max_prompt_tokens:
            low, low_tokens = size, tokens
        else:
            high = size
        interpolated = size + int((max_prompt_tokens - len(tokens)) // slope)
        guess = interpolated if num_tries < MAX_INTERPOLATIONS else (low + high) // 2
    return low, low_tokens
