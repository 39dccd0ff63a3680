"""Common-words and frequent-words tasks of RULER (Hsieh et al. 2024, arXiv 2404.06654, section 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_ext.evaluation.retrieval.haystack import Haystack
from megatron_ext.evaluation.retrieval.registry import TextTask, register
from megatron_ext.evaluation.retrieval.samples import Draft, SampleKey
from megatron_ext.evaluation.retrieval.words import DistinctStrings, adjective_noun, random_letters, words

COMMON_TOKENS, FREQUENT_TOKENS = 120, 50
NUM_COMMON = 10
MAX_SHORT_LENGTH = 4096
"""Length in tokens below which the lists repeat words less often and the example is shorter, as in RULER."""

MAX_SINGLE_WORD_LENGTH = 8192
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

MIN_WORDS = 53
"""Number of words from which the fourth word is always more frequent than the fifth, so that the answer is unique."""

TOKENS_PER_CODED_WORD = 50
"""Tokens of length per word of the vocabulary."""


def common_words(sample_key: SampleKey, _: Haystack) -> Draft:
    """Build a list in which ten words occur 30 times each and all others 3 times, after an example with its answer.

    Below 4096 tokens the words occur 6 times and once. A segment of hay is one of the other words. RULER uses single
    words at every length. Here a word is an adjective and a noun above 8192 tokens, for lack of single words.
    """
    is_short = sample_key.length < MAX_SHORT_LENGTH
    repeats, example_repeats, example_words = ((6, 1), (3, 1), 20) if is_short else ((30, 3), (10, 3), 40)
    vocabulary, max_size = _vocabulary(sample_key, example_words + NUM_COMMON)
    example, common = vocabulary.first(example_words), vocabulary.first(example_words + NUM_COMMON)[example_words:]
    example_question = _format_question(sample_key, example[:NUM_COMMON], example[NUM_COMMON:], example_repeats)

    def prompt(size: int) -> str:
        others = vocabulary.first(example_words + NUM_COMMON + size)[example_words + NUM_COMMON :]
        question = _format_question(sample_key, common, others, repeats)
        return f"{example_question} {_format_list(example[:NUM_COMMON])}\n{question}"

    return Draft(prompt, tuple(common), min_size=NUM_COMMON, max_size=max_size)


def frequent_words(sample_key: SampleKey, _: Haystack) -> Draft:
    """Build a text of coded words whose frequency falls with the square of their rank.

    Dots replace the most frequent word, and the next three are the answers. Segments of hay are words: of N words, the
    word of rank k occurs floor(N / (zeta(2) k^2)) times.
    """
    ranks = max(MIN_WORDS, sample_key.length // TOKENS_PER_CODED_WORD)
    vocabulary = [DOTS, *DistinctStrings(random_letters, sample_key.random("words")).first(ranks - 1)]

    def prompt(size: int) -> str:
        text = [word for rank, word in enumerate(vocabulary, 1) for _ in range(int(size / (ZETA_2 * rank**2)))]
        sample_key.random(f"order {size}").shuffle(text)
        return FREQUENT_PROMPT.format(context=" ".join(text))

    return Draft(prompt, tuple(vocabulary[1:4]), min_size=MIN_WORDS)


def _vocabulary(sample_key: SampleKey, num_used: int) -> tuple[DistinctStrings, int | None]:
    """Return the sample's stream of words, and the number left for the hay after `num_used` words; None: unlimited."""
    rng = sample_key.random("words")
    if sample_key.length > MAX_SINGLE_WORD_LENGTH:
        return DistinctStrings(adjective_noun, rng), None
    single = [*words("adjectives"), *words("nouns")]
    return DistinctStrings(lambda rng: rng.choice(single), rng), len(single) - num_used


def _format_question(
    sample_key: SampleKey, common: Sequence[str], others: Sequence[str], repeats: tuple[int, int]
) -> str:
    """Return the question for a shuffled list, up to the start of the answer."""
    items = [*common] * repeats[0] + [*others] * repeats[1]
    sample_key.random(f"order {len(items)}").shuffle(items)
    return COMMON_PROMPT.format(context=_format_list(items))


def _format_list(items: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(items, 1))


register("cwe", TextTask(common_words, COMMON_TOKENS))
register("fwe", TextTask(frequent_words, FREQUENT_TOKENS))
