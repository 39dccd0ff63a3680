"""Variable-tracking task of RULER (Hsieh et al. 2024, arXiv 2404.06654, section 3): a chain of assignments in noise."""

from __future__ import annotations

import random
import string

from megatron_ext.evaluation.retrieval.haystack import NOISE, Haystack, insert
from megatron_ext.evaluation.retrieval.registry import TextTask, register
from megatron_ext.evaluation.retrieval.samples import Draft, SampleKey
from megatron_ext.evaluation.retrieval.words import DistinctStrings

MAX_TOKENS = 30
NUM_HOPS = 4
NAME_LETTERS, EXAMPLE_NAME_LETTERS = 5, 3
EXAMPLE_LINES = 10
"""Lines of noise in the example, which has about 500 tokens with its assignments."""

KEYWORD = "VAR"

PROMPT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above. "
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are: "
)


def build_draft(sample_key: SampleKey, _: Haystack) -> Draft:
    """Build an example with its answer, and a chain of one value and four hops in order between lines of noise.

    The prompt ends with a space, as in RULER.
    """
    rng = sample_key.random("example")
    value, example_value = (str(number) for number in rng.sample(range(10000, 100000), 2))
    example_names = _draw_names(rng, EXAMPLE_NAME_LETTERS)
    example = _format_question(rng, example_names, example_value, EXAMPLE_LINES) + " ".join(example_names)
    names = _draw_names(sample_key.random("names"), NAME_LETTERS)

    def prompt(size: int) -> str:
        return f"{example}\n\n{_format_question(sample_key.random('depths'), names, value, size)}"

    return Draft(prompt, tuple(names))


def _draw_names(rng: random.Random, letters: int) -> list[str]:
    """Draw the names of a chain's variables, none of which is the keyword."""
    stream = DistinctStrings(lambda rng: "".join(rng.choices(string.ascii_uppercase, k=letters)), rng)
    drawn = stream.first(NUM_HOPS + 2)
    return [name for name in drawn if name != KEYWORD][: NUM_HOPS + 1]


def _format_question(rng: random.Random, names: list[str], value: str, lines: int) -> str:
    """Return the question for a chain in noise, up to the start of the answer."""
    sources = [value, *(f"{KEYWORD} {name}" for name in names[:-1])]
    chain = [f"{KEYWORD} {name} = {source}" for name, source in zip(names, sources, strict=True)]
    depths = sorted(rng.random() for _ in chain)
    context = insert([NOISE] * lines, list(zip(depths, chain, strict=True)))
    return PROMPT.format(context="\n".join(context), value=value, count=len(names))


register("vt", TextTask(build_draft, MAX_TOKENS))
