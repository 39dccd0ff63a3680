"""Hugging Face tokenizers: train a byte-level BPE, or use any tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from data_prep.manifest import TokenizerKind
from megatron_ext.utils.atomic_files import MAX_VOCABULARY_BYTES, read_regular
from megatron_ext.utils.errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_DOCUMENT, "</s>", "<eos>", "<|end_of_text|>", "<|eos|>", "[EOS]")
MIN_VOCAB_SIZE = 257
"""Minimum vocabulary size: 256 bytes and the end-of-document token."""

NO_TOKEN = "\0no token"
"""Unknown token that is set for a BPE that has none. Such a BPE would drop characters silently. As no vocabulary
contains this token, the library raises instead, at no cost in time."""

TRAINING_CHARACTERS = 256_000_000
"""Maximum characters of training text; more does not change the merges of a vocabulary of the usual sizes."""

MAX_WORD_LENGTH = 10_000
"""Maximum characters of a word. A longer run without spaces, or of spaces, is cut for training: the library's time is
quadratic in a word's length (3 s for 80,000 characters)."""

LONG_WORD = re.compile(rf"(?<!\S)\S{{{MAX_WORD_LENGTH + 1},}}|(?<!\s)\s{{{MAX_WORD_LENGTH + 1},}}")
"""Matches whole runs, and only from their beginning: linear in the text's length."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with `<|endoftext|>` as token 0.

    Args:
        texts: training documents; at most `TRAINING_CHARACTERS` are read.
        vocab_size: tokens in the vocabulary, including the 256 bytes and `<|endoftext|>`.

    Returns:
        A tokenizer that encodes any text losslessly. The same texts give the same tokenizer.

    Raises:
        UserError: `vocab_size` is too small for the bytes.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        problem = f"{vocab_size} is below {MIN_VOCAB_SIZE} (256 bytes and {END_OF_DOCUMENT})"
        raise UserError("--vocab-size", problem, "increase it")
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
        UserError: the file is missing, or is not a tokenizer.json.
    """
    if not path.is_file():
        raise UserError("--tokenizer", f"{path} is not a file", "give a tokenizer.json, or `train`")
    try:
        return Tokenizer.from_buffer(read_regular(path, MAX_VOCABULARY_BYTES))
    except Exception as error:  # the binding raises bare Exception
        problem = f"{path} is not a tokenizer.json ({' '.join(str(error).split())})"
        raise UserError("--tokenizer", problem, "give one written by Hugging Face tokenizers") from None


class NoTokenError(UserError):
    """Error for a text that the tokenizer cannot encode, without an unknown token."""


class JsonTokenizer:
    """A tokenizer.json of Hugging Face's library, configured for data preparation.

    There is no truncation, padding or template, and the text of a special token is encoded as ordinary text. Changes by
    the file's own normalizer and pre-tokenizer (case, accents, spaces) are the author's choice and are not checked.
    Text that remains after them is never dropped.

    Args:
        tokenizer: the loaded or trained tokenizer.
        path: file from which the tokenizer was loaded. None: it was trained or assembled by this program.
        ends: end-of-document tokens to try before `KNOWN_ENDS`.
    """

    kind: TokenizerKind = "huggingface"
    file_name = "tokenizer.json"
    pattern = ""

    def __init__(self, tokenizer: Tokenizer, path: Path | None = None, ends: tuple[str, ...] = ()) -> None:
        self._ends = (*ends, *KNOWN_ENDS)
        # The unchanged content, saved before the changes below.
        self._content = read_regular(path, MAX_VOCABULARY_BYTES) if path is not None else tokenizer.to_str().encode()
        self._tokenizer = tokenizer if path is not None else Tokenizer.from_buffer(self._content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        # Including gaps in the ids: the number of embedding rows that a model needs.
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        content = json.loads(self._content)
        self.unknown = _unknown_id(self._tokenizer, content["model"])
        self.special = frozenset(_special_ids(self._tokenizer, content.get("post_processor")))
        if isinstance(self._tokenizer.model, models.BPE) and self._tokenizer.model.unk_token is None:
            self._tokenizer.model.unk_token = NO_TOKEN

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts.

        Raises:
            NoTokenError: some text cannot be encoded, and there is no unknown token.
        """
        try:
            return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:
            if type(error) is not Exception:  # the binding raises bare Exception where its models fail
                raise
            problem = "the tokenizer has no token for some of the text, and no unknown token"
            raise NoTokenError("--tokenizer", problem, "give a byte-level tokenizer") from None

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def find_end(self, token: str | None = None) -> tuple[str, int] | None:
        """Return the named token, or the first known end-of-document token, with its id; None if there is none."""
        for candidate in (token,) if token else self._ends:
            found = self._tokenizer.token_to_id(candidate)
            if found is not None:
                return candidate, found
        return None

    def reserve(self, token: str) -> None:
        """Stop encoding text as a token, by flagging it as special: the library only excludes special tokens."""
        added_tokens = {added.content: added for added in self._tokenizer.get_added_tokens_decoder().values()}
        existing = added_tokens.get(token)
        if existing is None or not existing.special:
            flags = {} if existing is None else {name: getattr(existing, name) for name in _FLAGS}
            self._tokenizer.add_special_tokens([AddedToken(token, special=True, **flags)])

    def content(self) -> bytes:
        """Return the unchanged file, or the trained tokenizer."""
        return self._content


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def _special_ids(tokenizer: Tokenizer, processor: Any) -> Iterator[int]:
    """Yield the ids of tokens flagged as special, and of those that the file's template adds to a text."""
    yield from (token_id for token_id, added in tokenizer.get_added_tokens_decoder().items() if added.special)
    if isinstance(processor, dict):
        for token in (processor.get("special_tokens") or {}).values():
            yield from token["ids"]
        yield from (processor[name][1] for name in ("sep", "cls") if processor.get(name))
        for inner in processor.get("processors") or ():
            yield from _special_ids(tokenizer, inner)


def _unknown_id(tokenizer: Tokenizer, model: dict[str, Any]) -> int | None:
    if model.get("byte_fallback") and all(tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)):
        return None
    if "unk_id" in model:  # a Unigram model
        return model["unk_id"]
    name = model.get("unk_token")
    return tokenizer.token_to_id(name) if name else None


def _first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        if limit <= 0:
            return
        limit -= len(text)
        yield from _with_short_words(text)


def _with_short_words(text: str) -> Iterator[str]:
    """Yield a text in pieces whose words have at most `MAX_WORD_LENGTH` characters."""
    start = 0
    for word in LONG_WORD.finditer(text):
        for end in range(word.start() + MAX_WORD_LENGTH, word.end(), MAX_WORD_LENGTH):
            yield text[start:end]
            start = end
    if start < len(text):
        yield text[start:]
