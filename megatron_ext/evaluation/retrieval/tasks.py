"""All tasks by their names."""

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
    """A prompt and what the model writes after it.

    Attributes:
        draft: makes a sample but for its size.
        max_tokens: that the model may write.
        has_depth: whether there is one place that the answer stands at.
        score: from the model's text and the references to 0 to 1.
        is_over: whether what the model has written cannot change its score any more.
    """

    draft: Callable[[Place, Haystack], Draft]
    max_tokens: int
    has_depth: bool = False
    score: Callable[[str, Sequence[str]], float] = string_match_all
    is_over: Callable[[str], bool] = _never

    def sample(self, place: Place, material: Material) -> TextSample:
        """The sample at a place; raises `Unfit` if its length is too short."""
        return fit(self.draft(place, material.haystack), place, material.encode, self.max_tokens)

    def check(self, place: Place, material: Material) -> None:
        """Raise `Unfit` if the place's length is too short for the task, without making the whole sample."""
        shortest(self.draft(place, material.haystack), place, material.encode, self.max_tokens)


@dataclass(frozen=True)
class TokenTask:
    """A sequence of tokens, some of which the model is to foretell.

    Attributes:
        make: the sample at a place, from an alphabet of tokens.
        has_depth: whether there is one place that the answer stands at.
    """

    make: Callable[[Place, Sequence[int]], TokenSample]
    has_depth: bool = False

    def sample(self, place: Place, material: Material) -> TokenSample:
        """The sample at a place; raises `Unfit` if its length is too short."""
        return self.make(place, material.alphabet)

    def check(self, place: Place, material: Material) -> None:
        """Raise `Unfit` if the place's length is too short for the task."""
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
