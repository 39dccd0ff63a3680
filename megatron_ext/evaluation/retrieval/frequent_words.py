"""Common-words and frequent-words tasks of RULER (Hsieh et al. 2024, arXiv 2404.06654, section 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_ext.evaluation.retrieval.haystack import Haystack
from megatron_ext.evaluation.retrieval.samples import Draft, Place
from megatron_ext.evaluation.retrieval.words import Distinct, coded, pair, words

COMMON_TOKENS, FREQUENT_TOKENS = 120, 50
COMMON = 10
SHORT = 4096
"""Length in tokens below which the lists repeat words less often and the example is shorter, as in RULER."""

SINGLE_WORDS = 8192
"""Maximum length in tokens for which the word lists suffice. Above it, a word is an adjective and a noun."""

COMMON_PROMPT = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
    "words that appear most often in the list are:"
)
FREQUENT_PROMPT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text? Answer: According to the coded text above, the "
    "three most frequently appeared words are:"
)

DOTS = "..."
"""Replacement of the most frequent word."""

ZETA_2 = math.pi**2 / 6
"""Riemann's zeta function at the exponent of the words' frequencies, 2."""

FEWEST_WORDS = 53
"""Number of words from which the fourth word is always more frequent than the fifth, so that the answer is unique."""

TOKENS_A_CODED_WORD = 50
"""Tokens of length per word of the vocabulary."""


def common_words(place: Place, _: Haystack) -> Draft:
    """Build a list in which ten words occur 30 times each and all others 3 times, after an example with its answer.

    Below 4096 tokens the words occur 6 times and once. A piece of hay is one of the other words. RULER uses single
    words at every length. Here a word is an adjective and a noun above 8192 tokens, for lack of single words.
    """
    is_short = place.length < SHORT
    repeats, example_repeats, example_words = ((6, 1), (3, 1), 20) if is_short else ((30, 3), (10, 3), 40)
    vocabulary, largest = _vocabulary(place, example_words + COMMON)
    example, common = vocabulary.first(example_words), vocabulary.first(example_words + COMMON)[example_words:]
    shown = _list_prompt(place, example[:COMMON], example[COMMON:], example_repeats)

    def prompt(size: int) -> str:
        others = vocabulary.first(example_words + COMMON + size)[example_words + COMMON :]
        asked = _list_prompt(place, common, others, repeats)
        return f"{shown} {_numbered(example[:COMMON])}\n{asked}"

    return Draft(prompt, tuple(common), smallest=COMMON, largest=largest)


def frequent_words(place: Place, _: Haystack) -> Draft:
    """Build a text of coded words whose frequency falls with the square of their rank.

    Dots replace the most frequent word, and the next three are the answers. Pieces of hay are words: of N words, the
    word of rank k occurs floor(N / (zeta(2) k^2)) times.
    """
    ranks = max(FEWEST_WORDS, place.length // TOKENS_A_CODED_WORD)
    vocabulary = [DOTS, *Distinct(coded, place.random("words")).first(ranks - 1)]

    def prompt(size: int) -> str:
        text = [word for rank, word in enumerate(vocabulary, 1) for _ in range(int(size / (ZETA_2 * rank**2)))]
        place.random(f"order {size}").shuffle(text)
        return FREQUENT_PROMPT.format(context=" ".join(text))

    return Draft(prompt, tuple(vocabulary[1:4]), smallest=FEWEST_WORDS)


def _vocabulary(place: Place, taken: int) -> tuple[Distinct, int | None]:
    """Return the sample's stream of words, and the number left for the hay after `taken` words; None: unlimited."""
    rng = place.random("words")
    if place.length > SINGLE_WORDS:
        return Distinct(pair, rng), None
    single = [*words("adjectives"), *words("nouns")]
    return Distinct(lambda rng: rng.choice(single), rng), len(single) - taken


def _list_prompt(place: Place, common: Sequence[str], others: Sequence[str], repeats: tuple[int, int]) -> str:
    """Return the question for a shuffled list, up to the start of the answer."""
    listed = [*common] * repeats[0] + [*others] * repeats[1]
    place.random(f"order {len(listed)}").shuffle(listed)
    return COMMON_PROMPT.format(context=_numbered(listed))


def _numbered(listed: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
