"""Variable tracking of RULER (Hsieh et al. 2024, arXiv 2404.06654, section 3): a chain of assignments in noise."""

from __future__ import annotations

import random
import string

from megatron_ext.evaluation.retrieval.haystack import NOISE, Haystack, insert
from megatron_ext.evaluation.retrieval.samples import Draft, Place
from megatron_ext.evaluation.retrieval.words import Distinct

MAX_TOKENS = 30
HOPS = 4
NAME_LETTERS, EXAMPLE_NAME_LETTERS = 5, 3
EXAMPLE_LINES = 10
"""Of noise; with its assignments the example is about 500 tokens long."""

KEYWORD = "VAR"

PROMPT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above. "
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are: "
)


def draft(place: Place, _: Haystack) -> Draft:
    """An example with its answer, then a chain of one value and four hops, its lines in order between lines of noise.

    The blank at the prompt's end is RULER's.
    """
    rng = place.random("example")
    value, other = (str(number) for number in rng.sample(range(10000, 100000), 2))
    example_names = _names(rng, EXAMPLE_NAME_LETTERS)
    example = _text(rng, example_names, other, EXAMPLE_LINES) + " ".join(example_names)
    names = _names(place.random("names"), NAME_LETTERS)

    def prompt(size: int) -> str:
        return f"{example}\n\n{_text(place.random('depths'), names, value, size)}"

    return Draft(prompt, tuple(names))


def _names(rng: random.Random, letters: int) -> list[str]:
    """Names of a chain's variables; the keyword is none."""
    drawn = Distinct(lambda rng: "".join(rng.choices(string.ascii_uppercase, k=letters)), rng).first(HOPS + 2)
    return [name for name in drawn if name != KEYWORD][: HOPS + 1]


def _text(rng: random.Random, names: list[str], value: str, lines: int) -> str:
    """The question for a chain in noise, up to where the answer begins."""
    sources = [value, *(f"{KEYWORD} {name}" for name in names[:-1])]
    chain = [f"{KEYWORD} {name} = {source}" for name, source in zip(names, sources, strict=True)]
    depths = sorted(rng.random() for _ in chain)
    context = insert([NOISE] * lines, list(zip(depths, chain, strict=True)))
    return PROMPT.format(context="\n".join(context), value=value, count=len(names))
