"""Tokenizers: train a byte-level BPE, or take any tokenizer.json; find its end-of-document token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_ext.errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_DOCUMENT, "</s>", "<eos>", "<|end_of_text|>", "<|eos|>", "[EOS]")
SMALLEST_VOCABULARY = 257
"""256 bytes and the end-of-document token."""

TRAINING_CHARACTERS = 256_000_000
"""Text beyond this no longer changes the merges of a vocabulary of the usual sizes."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with `<|endoftext|>` as token 0.

    Args:
        texts: training documents; at most `TRAINING_CHARACTERS` are read.
        vocab_size: tokens in the vocabulary, the 256 bytes and `<|endoftext|>` included.

    Returns:
        A tokenizer that encodes any text and decodes it back to the letter. The same texts give the same tokenizer.

    Raises:
        UserError: `vocab_size` has no room for the bytes.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        problem = f"{vocab_size} is below {SMALLEST_VOCABULARY} (256 bytes and {END_OF_DOCUMENT})"
        raise UserError("--vocab-size", problem, "give a larger one")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_characters(texts, TRAINING_CHARACTERS), trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json.

    Raises:
        UserError: the file is missing or is none.
    """
    if not path.is_file():
        raise UserError("--tokenizer", f"{path} is no file", "give a tokenizer.json, or `train`")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception
        problem = f"{path} is no tokenizer.json ({' '.join(str(error).split())})"
        raise UserError("--tokenizer", problem, "give one that Hugging Face tokenizers wrote") from None


def end_of_document(tokenizer: Tokenizer, token: str | None = None) -> tuple[str, int]:
    """The end-of-document token and its id.

    Args:
        tokenizer: whose vocabulary is searched.
        token: the token the user names; None: the first of the usual ones that the vocabulary has.

    Raises:
        UserError: the vocabulary has no such token.
    """
    for candidate in (token,) if token else KNOWN_ENDS:
        found = tokenizer.token_to_id(candidate)
        if found is not None:
            return candidate, found
    if token:
        raise UserError("--eos-token", f"{token} is not in the tokenizer's vocabulary", "name one that is")
    problem = f"the tokenizer has no end-of-document token ({', '.join(KNOWN_ENDS)})"
    raise UserError("--tokenizer", problem, "name it with --eos-token TOKEN")


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id: the embedding rows that a model needs, gaps in the ids included."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def token_dtype(vocab_size: int) -> str:
    """NumPy name of the narrowest unsigned type that shards of this vocabulary are kept in."""
    return "uint16" if vocab_size < 65536 else "uint32"


class DocumentEncoder:
    """Encodes whole documents: no truncation, no padding, and no special token but the end of the document.

    A document in which the text of a special token stands is encoded letter by letter: raw text cannot end a document.
    """

    def __init__(self, tokenizer: Tokenizer, eos_id: int, dtype: str) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._end = [eos_id]
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def __call__(self, texts: list[str]) -> list[npt.NDArray[np.unsignedinteger]]:
        """Encode documents, each to a little-endian array that ends with the end-of-document token."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids + self._end, dtype=self._dtype) for encoding in encodings]


def _first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        if limit <= 0:
            return
        limit -= len(text)
        yield text
