"""A tokenizer beside a model, in Hugging Face's form: tokenizer.json, and what AutoTokenizer must know besides.

Run folders and exported ones keep the same two files, so that conversion copies them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_ext.checkpoint.conversion.exported_tokenizer import (
    TOKENIZER_CLASS,
    exported_config,
    exported_tokens,
    without_template,
)
from megatron_ext.errors import UserError
from megatron_ext.files import LARGEST_POINTER, LARGEST_VOCABULARY, os_reason, read_regular, write_whole
from megatron_ext.json_text import parse_json

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
COMPANIONS = (
    *(TOKENIZER_CONFIG, SPECIAL_TOKENS, "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
)
"""Files that transformers writes beside a tokenizer.json."""


@dataclass(frozen=True)
class KeptTokenizer:
    """A tokenizer that lies beside a model.

    Attributes:
        file: its tokenizer.json.
        end: token that ends a document; None: nothing says which.
        end_id: its id.
        size: largest id + 1.
        begin_id: id of the token that a document begins with; None: nothing says which.
    """

    file: Path
    end: str | None
    end_id: int | None
    size: int
    begin_id: int | None = None


def keep_tokenizer(source: Path, folder: Path, end: str | None, *, plain: bool = False) -> None:
    """Write a tokenizer's files into a folder, each whole or not at all.

    Args:
        source: a tokenizer.json.
        folder: exists.
        end: token that ends a document; None: not known.
        plain: whether it is to add no token to a text, as training has it.

    Raises:
        OSError: a file cannot be read or written.
    """
    content = read_regular(source, LARGEST_VOCABULARY)
    write_whole(folder / TOKENIZER, without_template(content) if plain else content)
    known = {} if end is None else {"eos_token": end}
    config = {"tokenizer_class": TOKENIZER_CLASS, "clean_up_tokenization_spaces": False, **known}
    _write_json(folder / TOKENIZER_CONFIG, config)


def copy_tokenizer(tokenizer: KeptTokenizer, folder: Path, *, plain: bool = False) -> None:
    """Copy a tokenizer into a folder with what transformers keeps beside it; what it must know is written at least.

    Of tokenizer_config.json and special_tokens_map.json what `exported_tokenizer` knows is kept: others name code.

    Args:
        tokenizer: that is copied.
        folder: exists.
        plain: whether it is to add no token to a text: a model that was trained here has seen none.

    Raises:
        OSError: a file cannot be read or written.
        UserError: a file is no JSON, or a link out of the folder.
    """
    keep_tokenizer(tokenizer.file, folder, tokenizer.end, plain=plain)
    for name in COMPANIONS:
        companion = tokenizer.file.parent / name
        if not companion.is_file():
            continue
        _refuse_link(companion)
        if name == TOKENIZER_CONFIG:
            _write_json(folder / name, exported_config(read_json(companion), plain=plain))
        elif name == SPECIAL_TOKENS:
            _write_json(folder / name, exported_tokens(read_json(companion)))
        else:
            write_whole(folder / name, read_regular(companion, LARGEST_VOCABULARY))


def _refuse_link(companion: Path) -> None:
    """Refuse a link out of a tokenizer's folder: what it leads to would be copied unread, and given to others.

    Caches of downloaded models are folders of links: models--A--B/snapshots/REVISION/NAME to models--A--B/blobs/HASH.

    Raises:
        UserError: it is one.
    """
    folder = companion.parent.resolve()
    known = [folder, *([folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else [])]
    if not any(companion.resolve().is_relative_to(one) for one in known):
        problem = f"is a link to {companion.resolve()}, and would be copied"
        raise UserError(str(companion), problem, "put the file itself there, or remove the link")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def kept_tokenizer(folder: Path, given: Path | None = None) -> KeptTokenizer | None:
    """The tokenizer of a model's folder; None where there is none.

    Args:
        folder: of the model.
        given: a tokenizer.json to take instead; what lies beside it counts as beside a model.

    Raises:
        UserError: its file cannot be read.
    """
    file = folder / TOKENIZER if given is None else given
    if not file.is_file() and given is None:
        return None
    try:
        tokenizer = Tokenizer.from_buffer(read_regular(file, LARGEST_VOCABULARY))
    except Exception as error:  # the binding raises bare Exception
        problem = f"is no tokenizer.json ({' '.join(str(error).split())})"
        raise UserError(str(file), problem, "give one that Hugging Face tokenizers wrote") from None
    end, begin = (_special(file.parent, f"{kind}_token") for kind in ("eos", "bos"))
    end_id, begin_id = (None if token is None else tokenizer.token_to_id(token) for token in (end, begin))
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    return KeptTokenizer(file, None if end_id is None else end, end_id, size, begin_id)


def _special(folder: Path, kind: str) -> str | None:
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        token = read_json(folder / name).get(kind) if (folder / name).is_file() else None
        if token is not None:
            return str(token["content"] if isinstance(token, dict) else token)  # an AddedToken, or its text
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds one object.

    Raises:
        UserError: it cannot be read as one.
    """
    try:
        content = parse_json(read_regular(path, LARGEST_VOCABULARY))
    except (OSError, ValueError) as error:
        raise UserError(str(path), f"cannot be read ({' '.join(str(error).split())})", "copy it again") from None
    if not isinstance(content, dict):
        raise UserError(str(path), "is no JSON object", "copy it again")
    return content


def read_name(path: Path) -> str:
    """The name that a file beside checkpoints gives of the newest one.

    Raises:
        UserError: it cannot be read, or is too large for a name.
    """
    try:
        return read_regular(path, LARGEST_POINTER).decode(errors="replace").strip()
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({os_reason(error)})", "copy it again") from None
