"""Folders of Hugging Face tokenizers. Only data files are read. Code in the folder is never run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from data_prep.tokenization.tokenizer import KNOWN_ENDS, JsonTokenizer, load_tokenizer
from megatron_ext.utils.atomic_files import MAX_VOCABULARY_BYTES, os_error_reason, read_regular
from megatron_ext.utils.errors import UserError

TOKENIZER, VOCABULARY, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
CONFIG, SPECIALS, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TOKENIZER_FILES = (TOKENIZER, VOCABULARY, MERGES, CONFIG, SPECIALS, ADDED)
"""Files of a folder that determine its tokenizer."""

BYTE_LEVEL = ("GPT2", "Roberta", "Bart", "Longformer", "LED", "OpenAIGPT2", "PreTrained")
"""Prefixes of `tokenizer_class` whose vocab.json and merges.txt are GPT-2's byte-level BPE with its pre-tokenizer."""

OTHER_FORMS = {".model": "a SentencePiece model", ".tiktoken": "a .tiktoken file", ".py": "code, which is never run"}
CONVERT = "save a tokenizer.json with the library that made it (transformers: save_pretrained)"


def open_folder(folder: Path) -> JsonTokenizer:
    """Open the tokenizer in a folder: its tokenizer.json, or a byte-level BPE from its vocab.json and merges.txt.

    The default end-of-document token is the `eos_token` of tokenizer_config.json or special_tokens_map.json.

    Raises:
        UserError: there is neither, or a file is damaged.
    """
    config, specials = _json(folder / CONFIG), _json(folder / SPECIALS)
    end = _name(config.get("eos_token")) or _name(specials.get("eos_token"))
    ends = () if end is None else (end,)
    if (folder / TOKENIZER).is_file():
        return JsonTokenizer(load_tokenizer(folder / TOKENIZER), folder / TOKENIZER, ends)
    if (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        return JsonTokenizer(_byte_level(folder, config, specials), None, ends)
    other_files = sorted({OTHER_FORMS[path.suffix] for path in folder.iterdir() if path.suffix in OTHER_FORMS})
    detail = f", but {' and '.join(other_files)}" if other_files else ""
    raise UserError("--tokenizer", f"{folder} has neither {TOKENIZER} nor {VOCABULARY} and {MERGES}{detail}", CONVERT)


def _byte_level(folder: Path, config: dict[str, Any], specials: dict[str, Any]) -> Tokenizer:
    kind = str(config.get("tokenizer_class") or "GPT2Tokenizer")
    if not kind.startswith(BYTE_LEVEL):
        problem = f"{folder} has no {TOKENIZER}, and a {kind} may split text differently from GPT-2's"
        raise UserError("--tokenizer", problem, CONVERT)
    try:
        model = models.BPE.from_file(str(folder / VOCABULARY), str(folder / MERGES))
    except Exception as error:  # the binding raises bare Exception
        problem = f"{folder / VOCABULARY} and {MERGES} cannot be read ({' '.join(str(error).split())})"
        raise UserError("--tokenizer", problem, "give the files as they were published") from None
    tokenizer = Tokenizer(model)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    missing = [character for character in alphabet if tokenizer.token_to_id(character) is None]
    if missing:
        problem = f"{folder / VOCABULARY} lacks tokens for {len(missing)} of the 256 bytes, so it is not byte-level BPE"
        raise UserError("--tokenizer", problem, CONVERT)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, folder, config, specials)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, folder: Path, config: dict[str, Any], specials: dict[str, Any]) -> None:
    """Add the tokens outside the vocabulary with their own ids, and mark the special ones."""
    names = [name for value in (*specials.values(), *_tokens_of(config)) for name in _names(value)]
    special_names = dict.fromkeys([*names, *(end for end in KNOWN_ENDS if tokenizer.token_to_id(end) is not None)])
    decoder = config.get("added_tokens_decoder") or {}
    ids = {str(token.get("content")): int(token_id) for token_id, token in decoder.items() if str(token_id).isdigit()}
    ids |= {name: int(token_id) for name, token_id in _json(folder / ADDED).items()}
    special_names |= dict.fromkeys(str(token["content"]) for token in decoder.values() if token.get("special"))
    for name in sorted({*ids, *special_names}, key=lambda name: (ids.get(name, 1 << 60), name)):
        token = AddedToken(name, special=name in special_names, normalized=False)
        (tokenizer.add_special_tokens if name in special_names else tokenizer.add_tokens)([token])
        if name in ids and tokenizer.token_to_id(name) != ids[name]:
            problem = f"{folder} gives {name} the id {ids[name]}, which does not fit its vocabulary"
            raise UserError("--tokenizer", problem, CONVERT)


def _tokens_of(config: dict[str, Any]) -> list[Any]:
    return [
        value for name, value in config.items() if name.endswith("_token") and not name.startswith(("add_", "use_"))
    ]


def _names(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [name for token in values if (name := _name(token))]


def _name(value: Any) -> str | None:
    """Return the text of a token, which is given as a string or as an object with flags."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path, MAX_VOCABULARY_BYTES))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError("--tokenizer", f"{path} cannot be read ({os_error_reason(error)})", "copy it again") from None
    except (ValueError, RecursionError) as error:
        raise UserError("--tokenizer", f"{path} is not JSON ({error})", "give it as it was published") from None
    if not isinstance(content, dict):
        raise UserError("--tokenizer", f"{path} is not a JSON object", "give it as it was published")
    return content
