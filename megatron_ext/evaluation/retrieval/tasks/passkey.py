"""Passkey retrieval (Mohtashami & Jaggi 2023, arXiv 2305.16300, section 4.2)."""

from __future__ import annotations

from megatron_ext.evaluation.retrieval.haystack import NOISE, Haystack
from megatron_ext.evaluation.retrieval.registry import TextTask, register
from megatron_ext.evaluation.retrieval.samples import Draft, SampleKey
from megatron_ext.evaluation.retrieval.scoring import first_integer, integer_is_over

MAX_TOKENS = 16
MAX_KEY = 50000

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
KEY = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"


def build_draft(sample_key: SampleKey, _: Haystack) -> Draft:
    """Build a prompt with a random number between repetitions of the noise; the haystack is not used.

    The noise is repeated as a whole, as in LongLoRA (arXiv 2309.12307). Mohtashami & Jaggi cut it at any character.
    """
    assert sample_key.depth is not None
    depth, key = sample_key.depth, str(sample_key.random("key").randint(1, MAX_KEY))

    def prompt(size: int) -> str:
        lines_before = int(size * depth)
        lines = [
            TASK,
            " ".join([NOISE] * lines_before),
            KEY.format(key=key),
            " ".join([NOISE] * (size - lines_before)),
            QUESTION,
        ]
        return "\n".join(line for line in lines if line)

    return Draft(prompt, (key,))


register("passkey", TextTask(build_draft, MAX_TOKENS, True, first_integer, integer_is_over))
