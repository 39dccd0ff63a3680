"""tiktoken's encodings, by name or from a local .tiktoken file."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
from pathlib import Path

import tiktoken

from data_prep.manifest import TokenizerEntry, TokenizerKind
from megatron_ext.utils.atomic_files import MAX_VOCABULARY_BYTES, read_regular
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.temp_dirs import scratch_folder

TIKTOKEN_SUFFIX = ".tiktoken"
END_TOKEN = "<|endoftext|>"
PUBLISHED_URL = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"
"""URL from which tiktoken loads a file. The URL's SHA-1 is the file's name in tiktoken's cache."""


def is_encoding_name(name: str) -> bool:
    """Return True if tiktoken has an encoding with this name."""
    return name in tiktoken.list_encoding_names()


class TiktokenTokenizer:
    """Byte-pair encoding by tiktoken; any text can be encoded."""

    kind: TokenizerKind = "tiktoken"
    file_name = "tokenizer.tiktoken"
    unknown: int | None = None

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding
        self.pattern = encoding._pat_str
        self.vocab_size = encoding.max_token_value + 1
        self.special = frozenset(encoding.encode_single_token(token) for token in encoding.special_tokens_set)
        self._unused_ids = set(range(self.vocab_size)).difference(encoding._mergeable_ranks.values(), self.special)

    @classmethod
    def open(cls, name: str, pattern: str) -> TiktokenTokenizer:
        """Open an encoding by name, or a file.

        A file without pattern must have the name and content of one of tiktoken's encodings. A file with a pattern gets
        `<|endoftext|>` as an additional token after its last token.

        Raises:
            UserError: the file is missing or damaged, the encoding is not available, or a pattern is missing.
        """
        path = Path(name)
        if not name.endswith(TIKTOKEN_SUFFIX):
            return cls(_load_published(name))
        if not path.is_file():
            raise UserError("--tokenizer", f"{path} is not a file", "give a .tiktoken file or the name of an encoding")
        if not pattern and is_encoding_name(path.stem):
            return cls(_load_published(path.stem, path))
        if not pattern:
            problem = f"is not given, but {path} does not contain the pattern that splits text"
            raise UserError("--tiktoken-pattern", problem, "give the regular expression of the encoding")
        ranks = _ranks(path)
        return cls(_encoding(path.stem, pattern, ranks, {END_TOKEN: 1 + max(ranks.values())}))

    @classmethod
    def open_saved(cls, path: Path, entry: TokenizerEntry) -> TiktokenTokenizer:
        """Open the file beside a manifest."""
        return cls(_encoding(path.stem, entry.pattern, _ranks(path), {entry.eos_token: entry.eos_id}))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts."""
        return [self._encoding.encode_ordinary(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids. Bytes that are not UTF-8 become U+FFFD, and ids without a token are skipped."""
        known = [token for token in ids if token < self.vocab_size and token not in self._unused_ids]
        return self._encoding.decode(known)

    def find_end(self, token: str | None = None) -> tuple[str, int] | None:
        """Return one of the encoding's special tokens (default: `END_TOKEN`) and its id; None if it does not exist."""
        name = token or END_TOKEN
        if name not in self._encoding.special_tokens_set:
            return None
        return name, self._encoding.encode_single_token(name)

    def reserve(self, token: str) -> None:
        """Do nothing: no text is encoded as a special token."""

    def content(self) -> bytes:
        """Return the ranks in tiktoken's format: a base64 token and its rank per line."""
        ranks = sorted(self._encoding._mergeable_ranks.items(), key=lambda item: item[1])
        return b"".join(base64.b64encode(token) + b" " + str(rank).encode() + b"\n" for token, rank in ranks)


def _load_published(name: str, file: Path | None = None) -> tiktoken.Encoding:
    """Return one of tiktoken's encodings. A local file is loaded through tiktoken's cache, which verifies it."""
    previous = os.environ.get("TIKTOKEN_CACHE_DIR")
    with scratch_folder("tiktoken") as cache:
        if file is not None:
            shutil.copyfile(file, cache / hashlib.sha1(PUBLISHED_URL.format(name).encode()).hexdigest())
            os.environ["TIKTOKEN_CACHE_DIR"] = str(cache)
        try:
            return tiktoken.get_encoding(name)
        except Exception as error:  # any error of the downloading library
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            hint = f"give its {name}.tiktoken as a local file; a different encoding needs --tiktoken-pattern"
            raise UserError("--tokenizer", f"{name} cannot be loaded ({reason})", hint) from None
        finally:
            os.environ.pop("TIKTOKEN_CACHE_DIR", None)
            if previous is not None:
                os.environ["TIKTOKEN_CACHE_DIR"] = previous


def _ranks(path: Path) -> dict[bytes, int]:
    """Read ranks from a file. tiktoken's own reader caches by path and would not notice that the file has changed."""
    try:
        lines = (line.split() for line in read_regular(path, MAX_VOCABULARY_BYTES).splitlines() if line)
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError) as error:
        raise UserError("--tokenizer", f"{path} is not a .tiktoken file ({error})", "give one") from None


def _encoding(name: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int]) -> tiktoken.Encoding:
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise UserError("--tokenizer", f"{name} has no token for byte {missing}", "give one that encodes any text")
    try:
        return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    except Exception as error:  # the binding raises ValueError and its own kinds
        raise UserError("--tiktoken-pattern", f"{pattern!r} cannot be used ({error})", "give another") from None
