"""Registry of the retrieval tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_ext.evaluation.retrieval import copying, frequent_words, induction, needles, passkey, recall, variables
from megatron_ext.evaluation.retrieval.haystack import Haystack
from megatron_ext.evaluation.retrieval.options import TaskName
from megatron_ext.evaluation.retrieval.samples import Draft, Material, Place, TextSample, TokenSample, fit, shortest
from megatron_ext.evaluation.retrieval.scoring import first_integer, integer_is_over, string_match_all


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

    draft: Callable[[Place, Haystack], Draft]
    max_tokens: int
    has_depth: bool = False
    score: Callable[[str, Sequence[str]], float] = string_match_all
    is_over: Callable[[str], bool] = _never

    def sample(self, place: Place, material: Material) -> TextSample:
        """Build the sample with the key `place`. Raises `Unfit` if `place.length` is too short."""
        return fit(self.draft(place, material.haystack), place, material.encode, self.max_tokens)

    def check(self, place: Place, material: Material) -> None:
        """Raise `Unfit` if `place.length` is too short for the task, without building the whole sample."""
        shortest(self.draft(place, material.haystack), place, material.encode, self.max_tokens)


@dataclass(frozen=True)
class TokenTask:
    """Task with a synthetic token sequence, some of whose tokens the model predicts.

    Attributes:
        make: function that builds the sample of a key from an alphabet of tokens.
        has_depth: True if the answer is at a single position of the context, so that its depth can be varied.
    """

    make: Callable[[Place, Sequence[int]], TokenSample]
    has_depth: bool = False

    def sample(self, place: Place, material: Material) -> TokenSample:
        """Build the sample with the key `place`. Raises `Unfit` if `place.length` is too short."""
        return self.make(place, material.alphabet)

    def check(self, place: Place, material: Material) -> None:
        """Raise `Unfit` if `place.length` is too short for the task."""
        self.sample(place, material)


Task = TextTask | TokenTask

TASKS: dict[TaskName, Task] = {
    "passkey": TextTask(passkey.draft, passkey.MAX_TOKENS, True, first_integer, integer_is_over),
    **{
        name: TextTask(partial(needles.draft, variant), needles.MAX_TOKENS, variant.has_depth)
        for name, variant in needles.VARIANTS.items()
    },
    "vt": TextTask(variables.draft, variables.MAX_TOKENS),
    "cwe": TextTask(frequent_words.common_words, frequent_words.COMMON_TOKENS),
    "fwe": TextTask(frequent_words.frequent_words, frequent_words.FREQUENT_TOKENS),
    "mqar": TokenTask(recall.make),
    "selective_copying": TokenTask(copying.make),
    "induction": TokenTask(induction.make, has_depth=True),
}
