"""Tokenizer stored in a run folder, with one interface for all kinds of tokenizers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from data_prep.manifest import TokenizerEntry
from data_prep.tokenization.rwkv_world import RwkvTokenizer
from data_prep.tokenization.tiktoken_files import TiktokenTokenizer
from data_prep.tokenization.tokenizer import NoTokenError
from data_prep.tokenization.vocabularies import TextTokenizer, load_saved_tokenizer, unencodable_part
from megatron_ext.runs import tokenizer_files
from megatron_ext.utils.atomic_files import MAX_VOCABULARY_BYTES, read_regular, write_atomically
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.untrusted_paths import path_within

ENTRY = "tokenizer_entry.json"
"""File with the manifest's `TokenizerEntry`, written beside a tokenizer that is not a tokenizer.json."""

_FILES = {"tiktoken": TiktokenTokenizer.file_name, "rwkv": RwkvTokenizer.file_name}
"""Names of the stored tokenizer files by kind. The name in the manifest could collide with another file of the run."""


UNREADABLE = "\N{REPLACEMENT CHARACTER}"
"""Character that decoders substitute for invalid UTF-8. The character itself takes three bytes in UTF-8."""


class RunTokenizer:
    """Tokenizer of a run.

    As in training, no special tokens are added, and text cannot produce the end-of-document token.

    Args:
        tokenizer: tokenizer that encodes and decodes text.
        end_id: id of the end-of-document token; None: unknown.
        size: vocabulary size.
    """

    def __init__(self, tokenizer: TextTokenizer, end_id: int | None, size: int) -> None:
        self._tokenizer, self._end_id, self.size = tokenizer, end_id, size

    @property
    def end_id(self) -> int:
        """Id of the end-of-document token.

        Raises:
            UserError: the token is unknown.
        """
        if self._end_id is None:
            hint = "set eos_token in the run's tokenizer_config.json"
            raise UserError("the run's tokenizer", "its end-of-document token is unknown", hint)
        return self._end_id

    @property
    def end_id_or_none(self) -> int | None:
        """Id of the end-of-document token; None: unknown."""
        return self._end_id

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text.

        Raises:
            UserError: part of the text has no token and there is no unknown token.
        """
        try:
            return self._tokenizer.encode_batch([text])[0]
        except NoTokenError:
            problem = f"has no token for text such as {unencodable_part(self._tokenizer, text)!r}, and no unknown token"
            raise UserError("the run's tokenizer", problem, "remove it from the text") from None

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self._tokenizer.decode(list(tokens))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that are not text, and of the unknown token."""
        unknown = self._tokenizer.unknown
        return self._tokenizer.special | (frozenset() if unknown is None else {unknown})

    def token_texts(self, size: int) -> list[str]:
        """Return the text of each of the first `size` ids as it is in the middle of a text.

        Some decoders drop a space at the beginning of a text, so that each token is decoded after one with letters. A
        part of a character is U+FFFD; an id without a token is empty.
        """
        decode, special = self._tokenizer.decode, self.special_ids
        alone = ((token, decode([token])) for token in range(size) if token not in special)
        before, prefix = next((([token], text) for token, text in alone if text.isascii() and text.isalpha()), ([], ""))
        return [decode([*before, token]).removeprefix(prefix) for token in range(size)]

    def count_bytes(self, tokens: Sequence[int]) -> int:
        """Count the UTF-8 bytes of the text of tokens, decoding each token on its own.

        An end-of-document token counts 0. A token with part of a character counts one byte per replacement character
        of its decoded text. Up to three bytes share one replacement character, so the count may be too low.
        """
        count = 0
        for token, occurrences in Counter(tokens).items():
            if token != self._end_id:
                text = self._tokenizer.decode([token])
                count += occurrences * (len(text.encode()) - 2 * text.count(UNREADABLE))
        return count


def store_tokenizer(file: Path, entry: TokenizerEntry, folder: Path) -> None:
    """Store a tokenizer in a run folder; a tokenizer.json as `tokenizer_files` does, where conversion finds it.

    Args:
        file: file of the tokenizer.
        entry: entry of the tokenizer in the data's manifest.
        folder: existing run folder.

    Raises:
        OSError: a file cannot be read or written.
    """
    if entry.kind == "huggingface":
        tokenizer_files.write_tokenizer(file, folder, entry.eos_token)
        return
    fields = {**asdict(entry), "file": _FILES[entry.kind]}
    write_atomically(folder / fields["file"], read_regular(file, MAX_VOCABULARY_BYTES))
    write_atomically(folder / ENTRY, (json.dumps(fields, indent=2) + "\n").encode())


def stored_tokenizer(folder: Path) -> RunTokenizer | None:
    """Return the tokenizer stored in a run folder; None: there is none.

    Raises:
        UserError: its files cannot be read.
    """
    if (folder / ENTRY).is_file():
        entry = _read_entry(folder / ENTRY)
        return load_tokenizer(path_within(folder, entry.file, str(folder / ENTRY), follow_links=True), entry)
    stored = tokenizer_files.find_tokenizer(folder)
    if stored is None:
        return None
    entry = TokenizerEntry(
        stored.file.name, "", stored.size, stored.end or "", -1 if stored.end_id is None else stored.end_id
    )
    return RunTokenizer(load_saved_tokenizer(folder, entry), stored.end_id, stored.size)


def load_tokenizer(file: Path, entry: TokenizerEntry) -> RunTokenizer:
    """Load a tokenizer from a file, whose name may differ from that in its entry."""
    tokenizer = load_saved_tokenizer(file.parent, replace(entry, file=file.name))
    return RunTokenizer(tokenizer, entry.eos_id, entry.vocab_size)


def _read_entry(path: Path) -> TokenizerEntry:
    try:
        return TypeAdapter(TokenizerEntry).validate_json(read_regular(path))
    except (OSError, ValidationError):
        raise UserError(str(path), "cannot be read", "copy it again") from None
