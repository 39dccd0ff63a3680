"""Registry of retrieval tasks by name. Each file of `tasks` registers its own; `load_all` imports them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import megatron_ext.evaluation.retrieval.tasks
from megatron_ext.evaluation.retrieval.haystack import Haystack
from megatron_ext.evaluation.retrieval.samples import (
    Draft,
    SampleInputs,
    SampleKey,
    TextSample,
    TokenSample,
    encode_shortest,
    fit,
)
from megatron_ext.evaluation.retrieval.scoring import string_match_all
from megatron_ext.utils.registration import add_entry, import_modules


def _never(_: str) -> bool:
    return False


@dataclass(frozen=True)
class TextTask:
    """Task with a text prompt and a generated answer.

    Attributes:
        draft: function that builds a sample whose amount of hay is not fixed yet.
        max_tokens: maximum number of tokens to generate.
        has_depth: True if the answer is at a single position of the context, so that its depth can be varied.
        score: function from the generated text and the references to a score from 0 to 1.
        is_over: stopping criterion: returns True if more text cannot change the score.
    """

    draft: Callable[[SampleKey, Haystack], Draft]
    max_tokens: int
    has_depth: bool = False
    score: Callable[[str, Sequence[str]], float] = string_match_all
    is_over: Callable[[str], bool] = _never

    def sample(self, sample_key: SampleKey, inputs: SampleInputs) -> TextSample:
        """Build the sample with the key `sample_key`. Raises `DoesNotFitError` if `sample_key.length` is too short."""
        return fit(self.draft(sample_key, inputs.haystack), sample_key, inputs.encode, self.max_tokens)

    def check(self, sample_key: SampleKey, inputs: SampleInputs) -> None:
        """Raise `DoesNotFitError` if `sample_key.length` is too short, without building the whole sample."""
        encode_shortest(self.draft(sample_key, inputs.haystack), sample_key, inputs.encode, self.max_tokens)


@dataclass(frozen=True)
class TokenTask:
    """Task with a synthetic token sequence, some of whose tokens the model predicts.

    Attributes:
        make: function that builds the sample of a key from an alphabet of tokens.
        has_depth: True if the answer is at a single position of the context, so that its depth can be varied.
    """

    make: Callable[[SampleKey, Sequence[int]], TokenSample]
    has_depth: bool = False

    def sample(self, sample_key: SampleKey, inputs: SampleInputs) -> TokenSample:
        """Build the sample with the key `sample_key`. Raises `DoesNotFitError` if `sample_key.length` is too short."""
        return self.make(sample_key, inputs.alphabet)

    def check(self, sample_key: SampleKey, inputs: SampleInputs) -> None:
        """Raise `DoesNotFitError` if `sample_key.length` is too short for the task."""
        self.sample(sample_key, inputs)


Task = TextTask | TokenTask

TASKS: dict[str, Task] = {}
"""Registered tasks. Only `load_all` returns all of them."""


def register(name: str, task: Task) -> None:
    """Register a task under its name in `retrieval.tasks`.

    Raises:
        ValueError: the name is taken.
    """
    add_entry(TASKS, name, task, "retrieval tasks")


def load_all() -> dict[str, Task]:
    """Import every module of `tasks`, so that each task registers itself, and return the tasks by name."""
    import_modules(megatron_ext.evaluation.retrieval.tasks)
    return TASKS
