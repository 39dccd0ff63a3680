"""Common interface of all tokenizers: Hugging Face's, tiktoken's encodings, RWKV's world vocabulary."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

from data_prep.manifest import TokenizerEntry, TokenizerKind
from data_prep.storage import sha256_of
from data_prep.tokenization.folders import MERGES, TOKENIZER_FILES, VOCABULARY, open_folder
from data_prep.tokenization.rwkv_world import RwkvTokenizer, is_rwkv_vocabulary
from data_prep.tokenization.tiktoken_files import TIKTOKEN_SUFFIX, TiktokenTokenizer, is_encoding_name
from data_prep.tokenization.tokenizer import JsonTokenizer, NoTokenError, load_tokenizer
from megatron_ext.utils.atomic_files import write_atomically
from megatron_ext.utils.errors import UserError

MAX_QUOTED_LENGTH = 40
"""Maximum number of characters of a text that a message quotes."""


class TextTokenizer(Protocol):
    """Interface of a tokenizer in data preparation.

    Attributes:
        kind: huggingface, tiktoken or rwkv.
        file_name: name of its file beside a manifest.
        pattern: regular expression that splits text before merging, if the file does not contain it; otherwise empty.
        vocab_size: largest id + 1.
        unknown: id of text that the tokenizer cannot encode; None: `encode_batch` encodes any text, or raises.
        special: ids of tokens that are not text, such as document boundaries, padding and chat roles.
    """

    kind: TokenizerKind
    file_name: str
    pattern: str
    vocab_size: int
    unknown: int | None
    special: frozenset[int]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts. The text of special tokens is encoded as ordinary text, and nothing is added.

        Raises:
            NoTokenError: some text cannot be encoded, and there is no unknown token.
        """
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; ids without a token, for which a model may still have rows, are skipped."""
        ...

    def find_end(self, token: str | None = None) -> tuple[str, int] | None:
        """Return the end-of-document token and its id; None if there is no such token.

        Args:
            token: the token's text; None: the first common end-of-document token in the vocabulary.
        """
        ...

    def reserve(self, token: str) -> None:
        """Make `encode_batch` encode the text of a token as ordinary text, as it does with special tokens."""
        ...

    def content(self) -> bytes:
        """Return the content of the tokenizer's file in a prepared folder."""
        ...


def open_tokenizer(name: str, pattern: str = "") -> TextTokenizer:
    """Open the tokenizer that `--tokenizer` or `--source-tokenizer` names.

    Args:
        name: a tokenizer.json, a folder with tokenizer.json or with vocab.json and merges.txt (or the path of that
            vocab.json), a .tiktoken file, the name of a tiktoken encoding, or RWKV's vocabulary file.
        pattern: regular expression that splits text, for a .tiktoken file that is not one of tiktoken's own.

    Raises:
        UserError: the name denotes none of these.
    """
    path = Path(name)
    if name.endswith(TIKTOKEN_SUFFIX) or (is_encoding_name(name) and not path.exists()):
        return TiktokenTokenizer.open(name, pattern)
    if (folder := _folder_of(path)) is not None:
        return open_folder(folder)
    if path.is_file() and is_rwkv_vocabulary(path):
        return RwkvTokenizer(path)
    return JsonTokenizer(load_tokenizer(path), path)


def tokenizer_files(name: str) -> list[Path]:
    """Return the files that `open_tokenizer` reads for a name; none for the name of a tiktoken encoding."""
    folder = _folder_of(Path(name))
    paths = [Path(name)] if folder is None else [folder / file for file in TOKENIZER_FILES]
    return [path for path in paths if path.is_file()]


def _folder_of(path: Path) -> Path | None:
    if path.is_dir():
        return path
    return path.parent if path.name == VOCABULARY and (path.parent / MERGES).is_file() else None


@lru_cache(maxsize=1)
def load_saved_tokenizer(root: Path, entry: TokenizerEntry) -> TextTokenizer:
    """Return the tokenizer in a prepared folder. The result is cached, so that a worker reads the file only once."""
    tokenizer = _open_saved(root / entry.file, entry)
    if entry.eos_token:
        tokenizer.reserve(entry.eos_token)
    return tokenizer


def _open_saved(path: Path, entry: TokenizerEntry) -> TextTokenizer:
    if entry.kind == "tiktoken":
        return TiktokenTokenizer.open_saved(path, entry)
    return RwkvTokenizer(path) if entry.kind == "rwkv" else JsonTokenizer(load_tokenizer(path), path)


def check_vocabulary(file: Path, entry: TokenizerEntry) -> None:
    """Check that a manifest's vocabulary contains every token of its tokenizer.

    Args:
        file: file of the tokenizer, whose name may differ from the entry's.
        entry: the manifest's entry of the tokenizer.

    Raises:
        UserError: the tokenizer has more tokens than the manifest's vocabulary, or its file cannot be read.
    """
    required = max(load_saved_tokenizer(file.parent, replace(entry, file=file.name)).vocab_size, entry.eos_id + 1)
    if entry.vocab_size < required:
        problem = f"has ids up to {required - 1}, and the manifest's tokenizer.vocab_size is {entry.vocab_size}"
        raise UserError(str(file), problem, "copy the data again or prepare it again")


def save_tokenizer(root: Path, tokenizer: TextTokenizer, end: tuple[str, int]) -> TokenizerEntry:
    """Write a tokenizer to the folder `root`, and return its entry for the manifest."""
    path = root / tokenizer.file_name
    write_atomically(path, tokenizer.content())
    return TokenizerEntry(
        file=path.name,
        sha256=sha256_of(path),
        vocab_size=max(tokenizer.vocab_size, end[1] + 1),
        eos_token=end[0],
        eos_id=end[1],
        kind=tokenizer.kind,
        pattern=tokenizer.pattern,
    )


def end_of_document(tokenizer: TextTokenizer, token: str | None = None) -> tuple[str, int]:
    """Return the end-of-document token and its id. The tokenizer no longer encodes text as this token afterwards.

    Args:
        tokenizer: tokenizer with the vocabulary.
        token: token named by the user; None: the first common end-of-document token in the vocabulary.

    Raises:
        UserError: the vocabulary has no such token, or ordinary text is encoded as this token, so that a document would
            seem to end in the middle.
    """
    found = tokenizer.find_end(token)
    if found is not None:
        is_special = found[1] in tokenizer.special
        tokenizer.reserve(found[0])
        # A model may still encode ordinary text as a special token. Such documents are rejected when they are encoded.
        if not is_special and _encodes_text(tokenizer, *found):
            problem = f"{found[0]} also encodes ordinary text, so documents would end in the middle"
            raise UserError("--eos-token", problem, "choose a special token of the tokenizer")
        return found
    if token:
        raise UserError("--eos-token", f"{token} is not in the tokenizer's vocabulary", "choose one that is")
    raise UserError("--tokenizer", "the tokenizer has no end-of-document token", "choose one with --eos-token TOKEN")


def _encodes_text(tokenizer: TextTokenizer, token: str, token_id: int) -> bool:
    """Return True if a tokenizer encodes the text of a token, alone or between words, as that token."""
    decoded = tokenizer.decode([token_id])  # a vocabulary's spelling may differ: `Ġthe` is ` the`
    for text in (token, f"a{token}b", f"a {token} b", f"a\n{token}\nb", decoded, f"a{decoded}"):
        try:
            if token_id in tokenizer.encode_batch([text])[0]:
                return True
        except NoTokenError:
            continue
    return False


def unencodable_part(tokenizer: TextTokenizer, text: str) -> str:
    """Return the first word of a text that the tokenizer cannot encode, shortened for a message.

    Args:
        tokenizer: tokenizer that raised `NoTokenError` for the text, or used its unknown token.
        text: the text. If each of its words can be encoded separately, the whole text is returned, shortened.
    """
    return next((word for word in text.split() if _is_unencodable(tokenizer, word)), text)[:MAX_QUOTED_LENGTH]


def _is_unencodable(tokenizer: TextTokenizer, word: str) -> bool:
    try:
        return tokenizer.unknown in tokenizer.encode_batch([word])[0]
    except NoTokenError:
        return True


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the NumPy name of the narrowest unsigned dtype in which shards of this vocabulary are stored."""
    return "uint16" if vocab_size < 65536 else "uint32"
