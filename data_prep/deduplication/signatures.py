"""Signatures that are equal for equal or similar texts: datatrove's step with other word splitting and hashes.

Near-duplicates: MinHash over word n-grams, Lee et al. 2022 (arXiv 2107.06499). Exact duplicates: a hash of the text.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice

import numpy as np
import xxhash
from datatrove.data import Document
from datatrove.io import DataFolder, get_datafolder
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from datatrove.utils.text import simplify_text
from datatrove.utils.word_tokenizers import WordTokenizer

from data_prep.contamination.ngrams import Hashes, window_hashes

BLOCK_SHINGLES = 512
"""Number of n-grams whose permuted hashes are in memory at once: 0.5 MB for 112 permutations, at any text length."""

BLOCK_DOCUMENTS = 1 << 22
"""Number of documents whose signatures are sorted at once: 285 MB per bucket with the defaults."""

RECORDS_PER_READ = 1 << 12
"""Number of signatures that a merge reads at once from each sorted block, and writes at once."""

_PRIME_BITS = np.uint64(61)
_PRIME = (np.uint64(1) << _PRIME_BITS) - np.uint64(1)
_HASH_MASK = (1 << 60) - 1  # datatrove reads signatures up to 2**61 - 1


class _Words(WordTokenizer):
    """Tokenizer that splits at spaces, which suffices after `simplify_text`. datatrove's own needs a spaCy model."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        raise NotImplementedError("signatures are of words")

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        raise NotImplementedError("signatures are of words")


class BoundedSignature(MinhashDedupSignature):
    """datatrove's signature step in bounded memory; datatrove's own step sorts all signatures of a task in memory.

    Args:
        folder: folder for signatures, local or an fsspec URL.
        config: MinHash configuration of datatrove.
    """

    output_folder: DataFolder

    def __init__(self, folder: str, config: MinhashConfig) -> None:
        super().__init__(folder, config, language=_Words())
        self._folder = folder
        integer_format = self.config.hash_config.struct_format
        hashes = [(f"hash{i}", f"<{integer_format}") for i in range(self.config.hashes_per_bucket)]
        self._record = np.dtype([*hashes, ("document", "<u4")])

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> None:
        """Write a task's sorted signatures, one file per bucket, byte for byte as datatrove's own step does."""
        documents, target = iter(data), self.output_folder
        super().run(islice(documents, BLOCK_DOCUMENTS), rank, world_size)
        blocks = [target]
        for first in documents:
            self.output_folder = get_datafolder(f"{self._folder}/blocks/{rank:05d}/{len(blocks):05d}")
            super().run(chain([first], islice(documents, BLOCK_DOCUMENTS - 1)), rank, world_size)
            blocks.append(self.output_folder)
        self.output_folder = target
        if len(blocks) > 1:
            for bucket in range(self.config.num_buckets):
                self._merge(blocks, f"bucket_{bucket:03d}/{rank:05d}.minhash.sig")

    def _merge(self, blocks: list[DataFolder], name: str) -> None:
        records = heapq.merge(
            *(self._records(block, name, index * BLOCK_DOCUMENTS) for index, block in enumerate(blocks))
        )
        with self.output_folder.open(f"merged/{name}", "wb") as file:
            while batch := list(islice(records, RECORDS_PER_READ)):
                file.write(np.array(batch, self._record).tobytes())
        for block in blocks:
            block.rm(name)
        self.output_folder.mv(f"merged/{name}", name)

    def _records(self, block: DataFolder, name: str, first_document: int) -> Iterator[tuple[int, ...]]:
        with block.open(name, "rb") as file:
            while content := file.read(RECORDS_PER_READ * self._record.itemsize):
                records = np.frombuffer(content, self._record).copy()
                records["document"] += first_document
                yield from records.tolist()


class NearSignature(BoundedSignature):
    """datatrove's MinHash signatures of whitespace-delimited words, in memory independent of the document length.

    Words come from datatrove's `simplify_text`: lower case, no punctuation, no accents, every number replaced by 0.
    """

    def get_shingles(self, text: str) -> Hashes:
        """Return the hashes of the text's word n-grams, uint64, shape (n-grams, 1)."""
        config = self.config.norm_config
        if text.isascii():
            config = replace(config, norm_unicode_diacritics=False)  # ASCII has no accents, and their search is slow
        words = self.word_tokenizer.word_tokenize(simplify_text(text, config))
        return window_hashes(words, self.config.n_grams).reshape(-1, 1)

    def get_signature(self, shingles: Hashes) -> list[list[int]]:
        """Return the minima of the permuted hashes, `hashes_per_bucket` for each bucket.

        The result is datatrove's, but is computed in blocks and without division.
        """
        factors, offsets = (x.reshape(-1, 1) for x in self.parameters)
        minima = np.full(self.num_hashes, _PRIME)
        for start in range(0, len(shingles), BLOCK_SHINGLES):
            permuted = shingles[start : start + BLOCK_SHINGLES].T * factors + offsets
            permuted = (permuted & _PRIME) + (permuted >> _PRIME_BITS)  # the remainder, or the remainder plus the prime
            np.minimum(permuted, permuted - _PRIME, out=permuted)  # a negative difference wraps to a large number
            np.minimum(minima, permuted.min(axis=1), out=minima)
        signature: list[list[int]] = minima.reshape(self.config.num_buckets, -1).tolist()
        return signature


class ExactSignature(BoundedSignature):
    """One signature per document: a 120-bit hash of its text, as two 60-bit integers."""

    def get_shingles(self, text: str) -> Hashes:
        """Return the two integers of the hash, uint64, shape (1, 2)."""
        hashed = xxhash.xxh3_128_intdigest(text.encode())
        return np.array([[hashed >> 64 & _HASH_MASK, hashed & _HASH_MASK]], np.uint64)

    def get_signature(self, shingles: Hashes) -> list[list[int]]:
        """Return the two integers as the signature of the only bucket."""
        signature: list[list[int]] = shingles.tolist()
        return signature
