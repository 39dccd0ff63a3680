"""Signatures that are the same where texts are equal or nearly so: datatrove's step with our words and hashes.

Near-duplicates: MinHash over word n-grams, Lee et al. 2022 (arXiv 2107.06499). Exact ones: a hash of the text.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import xxhash
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from datatrove.utils.text import simplify_text
from datatrove.utils.word_tokenizers import WordTokenizer

from data_prep.contamination.ngrams import Hashes, window_hashes

BLOCK_SHINGLES = 512
"""n-grams whose permuted hashes are in memory at a time, 0.5 MB at 112 permutations, however long a document is."""

_PRIME_BITS = np.uint64(61)
_PRIME = (np.uint64(1) << _PRIME_BITS) - np.uint64(1)
_HALF = (1 << 60) - 1  # datatrove reads signatures up to 2**61 - 1


class _Words(WordTokenizer):
    """Words between spaces. `simplify_text` leaves no others; datatrove's own for English needs a model of spaCy."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        raise NotImplementedError("signatures are of words")

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        raise NotImplementedError("signatures are of words")


class NearSignature(MinhashDedupSignature):
    """datatrove's MinHash signatures, of whitespace-delimited words, in memory that does not grow with a document.

    Words are those of datatrove's `simplify_text`: lower case, no punctuation, no accents, every number a 0.
    """

    def __init__(self, folder: str, config: MinhashConfig) -> None:
        super().__init__(folder, config, language=_Words())

    def get_shingles(self, text: str) -> Hashes:
        """Hashes of the word n-grams, shape (n-grams, 1)."""
        config = self.config.norm_config
        if text.isascii():
            config = replace(config, norm_unicode_diacritics=False)  # there are none, and to look for them is slow
        words = self.word_tokenizer.word_tokenize(simplify_text(text, config))
        return window_hashes(words, self.config.n_grams).reshape(-1, 1)

    def get_signature(self, shingles: Hashes) -> list[list[int]]:
        """Minima of the permuted hashes, bucket by bucket: datatrove's, block by block and without a division."""
        factors, offsets = (x.reshape(-1, 1) for x in self.parameters)
        minima = np.full(self.num_hashes, _PRIME)
        for start in range(0, len(shingles), BLOCK_SHINGLES):
            permuted = shingles[start : start + BLOCK_SHINGLES].T * factors + offsets
            permuted = (permuted & _PRIME) + (permuted >> _PRIME_BITS)  # the remainder, or that and once the prime
            np.minimum(permuted, permuted - _PRIME, out=permuted)  # what is below 0 wraps to the largest numbers
            np.minimum(minima, permuted.min(axis=1), out=minima)
        signature: list[list[int]] = minima.reshape(self.config.num_buckets, -1).tolist()
        return signature


class ExactSignature(MinhashDedupSignature):
    """One signature a document: 120 bits of hash of its text, as two numbers."""

    def __init__(self, folder: str, config: MinhashConfig) -> None:
        super().__init__(folder, config, language=_Words())

    def get_shingles(self, text: str) -> Hashes:
        """The two numbers, shape (1, 2)."""
        hashed = xxhash.xxh3_128_intdigest(text.encode())
        return np.array([[hashed >> 64 & _HALF, hashed & _HALF]], np.uint64)

    def get_signature(self, shingles: Hashes) -> list[list[int]]:
        """The two numbers as the signature of the only bucket."""
        signature: list[list[int]] = shingles.tolist()
        return signature
