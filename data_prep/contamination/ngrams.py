"""Words of a text for overlap detection, and 64-bit hashes of all its n-grams.

Brown et al. 2020 (arXiv 2005.14165, appendix C) call a gram "a lowercase, whitespace delimited word with no
punctuation", and the decontamination of lm-evaluation-harness deletes `string.punctuation`. Here, text is converted to
lower case, all characters of Unicode's punctuation categories (P) and of `string.punctuation` are deleted, and the rest
is split at whitespace. So "don't" and "well-known" are one word each, and a dash between spaces is none. Languages
without spaces between words have few words by this rule, and overlap in them is missed.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

Hashes = npt.NDArray[np.uint64]

_ASCII_PUNCTUATION = string.punctuation.encode()
_NON_ASCII = re.compile(r"[^\x00-\x7f]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case without punctuation."""
    plain = text.lower().encode().translate(None, _ASCII_PUNCTUATION).decode()  # ten times faster on bytes
    return _NON_ASCII.sub(_without_punctuation, plain).split()


def _without_punctuation(run: re.Match[str]) -> str:
    """Delete the punctuation of a non-ASCII run; a single pattern of all punctuation is a hundred times slower."""
    return "".join(c for c in run[0] if not unicodedata.category(c).startswith("P"))


def window_hashes(words: Sequence[str], n: int) -> Hashes:
    """Hash every run of n words: a polynomial in the words' 64-bit hashes, modulo 2**64.

    Two different runs collide with a probability of about 2**-64, or 2**-59 for the same words in another order. The
    hashes are identical in every process and on every machine.

    Args:
        words: words without whitespace.
        n: words per n-gram.

    Returns:
        Hashes in the order of the text, uint64 of shape (max(0, len(words) - n + 1),).
    """
    count = len(words) - n + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    encoded = " ".join(words).encode().split(b" ")
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, encoded), np.uint64, len(words))
    windows = hashes[:count].copy()
    for offset in range(1, n):
        windows *= _MULTIPLIER
        windows += hashes[offset : offset + count]
    return windows
