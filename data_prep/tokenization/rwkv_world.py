"""RWKV's world vocabulary: greedy longest match over bytes."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

from data_prep.manifest import TokenizerKind
from megatron_ext.utils.atomic_files import MAX_VOCABULARY_BYTES, open_regular, os_error_reason, read_regular
from megatron_ext.utils.errors import UserError

END_TOKEN, END_ID = "<|endoftext|>", 0
"""End of a document in RWKV: id 0, which has no bytes and no line in the file."""

LINE = re.compile(rb"(\d+) (b?'.*'|b?\".*\") (\d+)\r?\n?")
_ID = -1
"""Key of a trie node's own id, beside its children's bytes (0 to 255)."""


def is_rwkv_vocabulary(path: Path) -> bool:
    """Return True if the first line of a file is a line of an RWKV vocabulary."""
    with os.fdopen(open_regular(path), "rb") as file:
        return LINE.fullmatch(file.readline(1 << 16)) is not None


class RwkvTokenizer:
    """Tokenizer that encodes by greedy longest match.

    Source: the format of `rwkv_vocab_v20230424.txt` and its reference tokenizer (github.com/BlinkDL/RWKV-LM).

    Args:
        path: vocabulary file with one token per line: `<id> <Python literal of a string or bytes> <length in bytes>`.

    Raises:
        UserError: a line has another format, or a byte has no token of its own.
    """

    kind: TokenizerKind = "rwkv"
    file_name = "rwkv_vocab.txt"
    pattern = ""
    unknown: int | None = None
    special = frozenset({END_ID})

    def __init__(self, path: Path) -> None:
        try:
            self._content = read_regular(path, MAX_VOCABULARY_BYTES)
        except OSError as error:
            raise UserError(
                str(path), f"cannot be read ({os_error_reason(error)})", "give it as it was published"
            ) from None
        self._tokens: dict[int, bytes] = {END_ID: b""}
        self._root: dict[int, Any] = {}
        for line_number, line in enumerate(self._content.splitlines(), start=1):
            token_id, token = _parse(path, line_number, line)
            if token_id in self._tokens or not token:
                problem = "has no bytes" if not token else f"has the id {token_id}, which is already used"
                raise UserError(f"{path}:{line_number}", problem, "give the file as it was published")
            self._add(token_id, token)
        missing = next((byte for byte in range(256) if _ID not in self._root.get(byte, {})), None)
        if missing is not None:
            raise UserError(str(path), f"has no token for byte {missing}", "give a vocabulary that encodes any text")
        self.vocab_size = 1 + max(self._tokens)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts."""
        return [self._encode(text.encode()) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self._tokens.get(token, b"") for token in ids).decode("utf-8", "replace")

    def find_end(self, token: str | None = None) -> tuple[str, int] | None:
        """Return id 0 and its usual name; None for another name."""
        return (END_TOKEN, END_ID) if token in (None, END_TOKEN) else None

    def reserve(self, token: str) -> None:
        """Do nothing: id 0 has no bytes, and therefore no text."""

    def content(self) -> bytes:
        """Return the unchanged vocabulary file."""
        return self._content

    def _add(self, token_id: int, token: bytes) -> None:
        self._tokens[token_id] = token
        node = self._root
        for byte in token:
            node = node.setdefault(byte, {})
        node[_ID] = token_id

    def _encode(self, content: bytes) -> list[int]:
        ids: list[int] = []
        root, start, size = self._root, 0, len(content)
        while start < size:
            node = root[content[start]]
            best_id, position = node[_ID], start + 1
            end = position
            while position < size and (node := node.get(content[position])) is not None:
                position += 1
                if _ID in node:
                    best_id, end = node[_ID], position
            ids.append(best_id)
            start = end
        return ids


def _parse(path: Path, line_number: int, line: bytes) -> tuple[int, bytes]:
    match = LINE.fullmatch(line)
    if match is None:
        raise UserError(
            f"{path}:{line_number}", "is not a line of an RWKV vocabulary", "give the file as it was published"
        )
    try:
        token = ast.literal_eval(match[2].decode("utf-8"))
    except (SyntaxError, ValueError) as error:
        raise UserError(
            f"{path}:{line_number}", f"has no Python literal ({error})", "give the file as published"
        ) from None
    content = token.encode() if isinstance(token, str) else token
    if len(content) != int(match[3]):
        problem = f"states a length of {int(match[3])} bytes, but has {len(content)}"
        raise UserError(f"{path}:{line_number}", problem, "give the file as it was published")
    return int(match[1]), content
