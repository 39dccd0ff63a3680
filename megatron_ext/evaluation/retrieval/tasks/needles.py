"""Needle-in-a-haystack tasks: the eight of RULER (Hsieh et al. 2024, arXiv 2404.06654, section 3)."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from megatron_ext.evaluation.retrieval.haystack import NOISE_LINES, Haystack, insert
from megatron_ext.evaluation.retrieval.registry import TextTask, register
from megatron_ext.evaluation.retrieval.samples import Draft, SampleKey
from megatron_ext.evaluation.retrieval.words import DistinctStrings, adjective_noun

MAX_TOKENS = 128

NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
SINGLE_QUESTION = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the provided text? "
    "The special magic {kind} for {query} mentioned in the provided text is"
)
MULTIPLE_QUESTION = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind}s afterwards.\n{context}\nWhat are all the special magic {kind}s for {query} mentioned in the provided "
    "text? The special magic {kind}s for {query} mentioned in the provided text are"
)


@dataclass(frozen=True)
class Variant:
    """Variant of the task, which is a row of RULER's table.

    Attributes:
        hay: `noise` sentences, the user's `text` (RULER: Paul Graham's essays), or more `needles`.
        key: type of the keys. A `word` is an adjective and a noun.
        value: type of the values. A `number` has seven digits.
        keys: number of keys, including the queried keys.
        values: number of values per key.
        queries: number of queried keys. The first keys are queried.
    """

    hay: Literal["noise", "text", "needles"]
    key: Literal["word", "uuid"] = "word"
    value: Literal["number", "uuid"] = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def has_depth(self) -> bool:
        """True if a single needle is queried, so that its depth can be set."""
        return self.values == self.queries == 1


VARIANTS = {
    "niah_single_1": Variant("noise"),
    "niah_single_2": Variant("text"),
    "niah_single_3": Variant("text", value="uuid"),
    "niah_multikey_1": Variant("text", keys=4),
    "niah_multikey_2": Variant("needles"),
    "niah_multikey_3": Variant("needles", key="uuid", value="uuid"),
    "niah_multivalue": Variant("text", values=4),
    "niah_multiquery": Variant("text", keys=4, queries=4),
}


def _number(rng: random.Random) -> str:
    return str(rng.randint(1_000_000, 9_999_999))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


GENERATORS = {"word": adjective_noun, "number": _number, "uuid": _uuid}


def build_draft(variant: Variant, sample_key: SampleKey, haystack: Haystack) -> Draft:
    """Build a context with needles, and a question for the values of the queried keys.

    A single queried needle is at the depth `sample_key.depth`; all other needles are at random depths. All keys are
    distinct, and so are all values. A haystack of text begins at a random sentence of the corpus, and ends with the
    last whole sentence that fits. In RULER, all samples begin at the same sentence.
    """
    keys = DistinctStrings(GENERATORS[variant.key], sample_key.random("keys"))
    values = DistinctStrings(GENERATORS[variant.value], sample_key.random("values"))
    needle_indices = [(key, value) for key in range(variant.keys) for value in range(variant.values)]
    needle = partial(_needle, variant, keys, values)
    rng = sample_key.random("depths")
    depths = [rng.random() for _ in needle_indices]
    if sample_key.depth is not None:
        depths[0] = sample_key.depth
    placed_needles = [
        (depth, needle(key, index)) for index, (depth, (key, _)) in enumerate(zip(depths, needle_indices, strict=True))
    ]
    query = _enumerate(keys.first(variant.queries))
    hay, separator = _build_hay(variant, sample_key, haystack, needle, len(needle_indices))

    def prompt(size: int) -> str:
        context = separator.join(insert(hay(size), placed_needles))
        question = SINGLE_QUESTION if variant.has_depth else MULTIPLE_QUESTION
        return question.format(kind=variant.value, context=context, query=query)

    return Draft(prompt, tuple(values.first(variant.queries * variant.values)))


def _needle(variant: Variant, keys: DistinctStrings, values: DistinctStrings, key: int, value: int) -> str:
    """Return the needle with the key and the value of the given indices."""
    return NEEDLE.format(kind=variant.value, key=keys[key], value=values[value])


def _build_hay(
    variant: Variant, sample_key: SampleKey, haystack: Haystack, needle: Callable[[int, int], str], num_needles: int
) -> tuple[Callable[[int], list[str]], str]:
    """Return a function from the number of segments of hay to the segments, and the separator of the segments."""
    if variant.hay == "needles":
        return lambda size: [needle(index, index) for index in range(num_needles, num_needles + size)], "\n"
    source = haystack if variant.hay == "text" else NOISE_LINES
    start = sample_key.random("start").randrange(len(source.segments))
    return partial(source.cut, start), source.separator


def _enumerate(names: Sequence[str]) -> str:
    """Join names as `a` or `a, b, and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"


for _name, _variant in VARIANTS.items():
    register(_name, TextTask(partial(build_draft, _variant), MAX_TOKENS, _variant.has_depth))
