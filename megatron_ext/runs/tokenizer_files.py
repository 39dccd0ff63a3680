"""Tokenizer beside a model in Hugging Face's form: tokenizer.json, and the files that AutoTokenizer needs.

Run folders and exported folders contain the same files, so a conversion copies them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_ext.runs.exported_tokenizer import (
    TOKENIZER_CLASS,
    filter_config,
    filter_special_tokens,
    plain_tokenizer_json,
)
from megatron_ext.utils.atomic_files import (
    MAX_POINTER_BYTES,
    MAX_VOCABULARY_BYTES,
    os_error_reason,
    read_regular,
    write_atomically,
)
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
COMPANIONS = (
    *(TOKENIZER_CONFIG, SPECIAL_TOKENS, "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
)
"""Files that transformers writes beside tokenizer.json."""


@dataclass(frozen=True)
class StoredTokenizer:
    """Tokenizer beside a model.

    Attributes:
        file: its tokenizer.json.
        end: token that ends a document; None: not known.
        end_id: id of this token; None: not known.
        size: largest id + 1.
        begin_id: id of the token that begins a document; None: not known.
    """

    file: Path
    end: str | None
    end_id: int | None
    size: int
    begin_id: int | None = None


def write_tokenizer(source: Path, folder: Path, end: str | None, *, plain: bool = False) -> None:
    """Write a tokenizer's files into a folder, each atomically.

    Args:
        source: a tokenizer.json.
        folder: existing folder.
        end: token that ends a document; None: not known.
        plain: whether the tokenizer must not add tokens to a text, as in training.

    Raises:
        OSError: a file cannot be read or written.
    """
    content = read_regular(source, MAX_VOCABULARY_BYTES)
    write_atomically(folder / TOKENIZER, plain_tokenizer_json(content) if plain else content)
    known = {} if end is None else {"eos_token": end}
    config = {"tokenizer_class": TOKENIZER_CLASS, "clean_up_tokenization_spaces": False, **known}
    _write_json(folder / TOKENIZER_CONFIG, config)


def copy_tokenizer(tokenizer: StoredTokenizer, folder: Path, *, plain: bool = False) -> None:
    """Copy a tokenizer and the files that transformers keeps beside it into a folder.

    tokenizer.json and tokenizer_config.json are always written. tokenizer_config.json and special_tokens_map.json keep
    only the fields that `exported_tokenizer` allows, because others may refer to code.

    Args:
        tokenizer: tokenizer to copy.
        folder: existing folder.
        plain: whether the tokenizer must not add tokens to a text, as for a model trained with Selectron.

    Raises:
        OSError: a file cannot be read or written.
        UserError: a file is not valid JSON, or is a link out of the folder.
    """
    write_tokenizer(tokenizer.file, folder, tokenizer.end, plain=plain)
    for name in COMPANIONS:
        companion = tokenizer.file.parent / name
        if not companion.is_file():
            continue
        _reject_link(companion)
        if name == TOKENIZER_CONFIG:
            _write_json(folder / name, filter_config(read_json(companion), plain=plain))
        elif name == SPECIAL_TOKENS:
            _write_json(folder / name, filter_special_tokens(read_json(companion)))
        else:
            write_atomically(folder / name, read_regular(companion, MAX_VOCABULARY_BYTES))


def _reject_link(companion: Path) -> None:
    """Reject a link out of a tokenizer's folder, whose target would be copied and published unnoticed.

    Caches of downloaded models contain links from models--A--B/snapshots/REVISION/NAME to models--A--B/blobs/HASH,
    which are allowed.

    Raises:
        UserError: the file is such a link.
    """
    folder = companion.parent.resolve()
    allowed_roots = [folder, *([folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else [])]
    if not any(companion.resolve().is_relative_to(root) for root in allowed_roots):
        problem = f"is a link out of its folder, to {companion.resolve()}"
        raise UserError(str(companion), problem, "replace the link with the file, or remove it")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def find_tokenizer(folder: Path, path: Path | None = None) -> StoredTokenizer | None:
    """Return the tokenizer of a model's folder; None if there is none.

    Args:
        folder: folder of the model.
        path: another tokenizer.json to use instead, with the files beside it.

    Raises:
        UserError: the file cannot be read.
    """
    file = folder / TOKENIZER if path is None else path
    if not file.is_file() and path is None:
        return None
    try:
        tokenizer = Tokenizer.from_buffer(read_regular(file, MAX_VOCABULARY_BYTES))
    except Exception as error:  # the bindings raise bare Exception
        problem = f"is not a tokenizer.json ({' '.join(str(error).split())})"
        raise UserError(str(file), problem, "give a file that Hugging Face tokenizers wrote") from None
    end, begin = (_special_token(file.parent, f"{kind}_token") for kind in ("eos", "bos"))
    end_id, begin_id = (None if token is None else tokenizer.token_to_id(token) for token in (end, begin))
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    return StoredTokenizer(file, None if end_id is None else end, end_id, size, begin_id)


def _special_token(folder: Path, kind: str) -> str | None:
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        token = read_json(folder / name).get(kind) if (folder / name).is_file() else None
        if token is not None:
            return str(token["content"] if isinstance(token, dict) else token)  # a serialized AddedToken, or its text
    return None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        UserError: the file cannot be read, or contains no object.
    """
    try:
        content = parse_json(read_regular(path, MAX_VOCABULARY_BYTES))
    except (OSError, ValueError) as error:
        raise UserError(str(path), f"cannot be read ({' '.join(str(error).split())})", "copy it again") from None
    if not isinstance(content, dict):
        raise UserError(str(path), "is not a JSON object", "copy it again")
    return content


def read_pointer(path: Path) -> str:
    """Return the name of the newest checkpoint from a pointer file.

    Raises:
        UserError: the file cannot be read or is too large.
    """
    try:
        return read_regular(path, MAX_POINTER_BYTES).decode(errors="replace").strip()
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({os_error_reason(error)})", "copy it again") from None
