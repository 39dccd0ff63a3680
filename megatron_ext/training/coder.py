"""The tokenizer that a run keeps: what text is to the run's model, whoever made the tokens."""

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
from data_prep.tokenization.vocabularies import TextTokenizer, kept_tokenizer, lost_part
from megatron_ext.checkpoint.conversion import tokenizer_files
from megatron_ext.errors import UserError
from megatron_ext.files import LARGEST_VOCABULARY, read_regular, write_whole
from megatron_ext.paths import path_within

ENTRY = "tokenizer_entry.json"
"""Beside a tokenizer that is no tokenizer.json: what the data's manifest says of it, see `TokenizerEntry`."""

_FILES = {"tiktoken": TiktokenTokenizer.file_name, "rwkv": RwkvTokenizer.file_name}
"""Names of the kept files; the manifest's own name could be that of another file of the run."""


UNREADABLE = "\N{REPLACEMENT CHARACTER}"
"""What decoders put in place of bytes that are no whole character; three bytes of UTF-8 itself."""


class Coder:
    """A run's tokenizer. As in training nothing is added, and text cannot end a document.

    Args:
        tokenizer: reads and writes text.
        end_id: token that ends a document; None: nothing says which.
        size: tokens there are.
    """

    def __init__(self, tokenizer: TextTokenizer, end_id: int | None, size: int) -> None:
        self._tokenizer, self._end_id, self.size = tokenizer, end_id, size

    @property
    def end_id(self) -> int:
        """Token that ends a document.

        Raises:
            UserError: nothing says which.
        """
        if self._end_id is None:
            mend = "name it as eos_token in the run's tokenizer_config.json"
            raise UserError("the run's tokenizer", "nothing says which token ends a document", mend)
        return self._end_id

    @property
    def known_end(self) -> int | None:
        """Token that ends a document; None: nothing says which."""
        return self._end_id

    def encode(self, text: str) -> list[int]:
        """Tokens of a text.

        Raises:
            UserError: the tokenizer has neither tokens for some of it nor an unknown token.
        """
        try:
            return self._tokenizer.encode_batch([text])[0]
        except NoTokenError:
            problem = f"has no token for text such as {lost_part(self._tokenizer, text)!r}, and no unknown token"
            raise UserError("the run's tokenizer", problem, "give text without it") from None

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""
        return self._tokenizer.decode(list(tokens))

    def bytes_of(self, tokens: Sequence[int]) -> int:
        """Bytes of UTF-8 in the text of tokens, each by itself.

        An end of document has none. A token that holds a part of a character counts a byte for each piece that cannot
        be read, of which it may have up to three.
        """
        count = 0
        for token, times in Counter(tokens).items():
            if token != self._end_id:
                text = self._tokenizer.decode([token])
                count += times * (len(text.encode()) - 2 * text.count(UNREADABLE))
        return count


def keep_coder(file: Path, entry: TokenizerEntry, folder: Path) -> None:
    """Keep a tokenizer in a run's folder; a tokenizer.json as `tokenizer_files` does, which conversion copies.

    Args:
        file: of the tokenizer.
        entry: what the data's manifest says of it.
        folder: exists.

    Raises:
        OSError: a file cannot be read or written.
    """
    if entry.kind == "huggingface":
        tokenizer_files.keep_tokenizer(file, folder, entry.eos_token)
        return
    kept = {**asdict(entry), "file": _FILES[entry.kind]}
    write_whole(folder / kept["file"], read_regular(file, LARGEST_VOCABULARY))
    write_whole(folder / ENTRY, (json.dumps(kept, indent=2) + "\n").encode())


def coder_in(folder: Path) -> Coder | None:
    """The tokenizer that a run's folder keeps; None: it keeps none.

    Raises:
        UserError: its files cannot be read.
    """
    if (folder / ENTRY).is_file():
        entry = _entry(folder / ENTRY)
        return coder_of(path_within(folder, entry.file, str(folder / ENTRY), follow_links=True), entry)
    kept = tokenizer_files.kept_tokenizer(folder)
    if kept is None:
        return None
    entry = TokenizerEntry(kept.file.name, "", kept.size, kept.end or "", -1 if kept.end_id is None else kept.end_id)
    return Coder(kept_tokenizer(folder, entry), kept.end_id, kept.size)


def coder_of(file: Path, entry: TokenizerEntry) -> Coder:
    """The tokenizer in a file, which may be called otherwise than its entry says."""
    tokenizer = kept_tokenizer(file.parent, replace(entry, file=file.name))
    return Coder(tokenizer, entry.eos_id, entry.vocab_size)


def _entry(path: Path) -> TokenizerEntry:
    try:
        return TypeAdapter(TokenizerEntry).validate_json(read_regular(path))
    except (OSError, ValidationError):
        raise UserError(str(path), "cannot be read", "copy it again") from None
