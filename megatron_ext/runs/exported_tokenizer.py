"""Filters for exported tokenizer files: they keep what is needed to encode text, and remove references to code."""

from __future__ import annotations

import json
from typing import Any

TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""Tokenizer class of transformers that is fully defined by tokenizer.json."""

_SPECIAL_TOKEN_FIELDS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    *("additional_special_tokens", "extra_special_tokens"),
)

_ALLOWED_FIELDS = {
    *_SPECIAL_TOKEN_FIELDS,
    *("tokenizer_class", "added_tokens_decoder", "chat_template", "model_max_length", "model_input_names"),
    *("clean_up_tokenization_spaces", "spaces_between_special_tokens", "split_special_tokens", "add_prefix_space"),
    *("padding_side", "truncation_side", "do_lower_case", "strip_accents", "tokenize_chinese_chars"),
    *("add_bos_token", "add_eos_token", "legacy", "errors"),
}
"""Allowed fields of tokenizer_config.json: arguments of transformers' tokenizers.

`auto_map` and other fields that refer to code are excluded.
"""

_FIELDS_ADDING_TOKENS = {"add_bos_token", "add_eos_token"}


def filter_config(config: dict[str, Any], *, plain: bool) -> dict[str, Any]:
    """Return a tokenizer_config.json with only the allowed fields.

    Args:
        config: contents of the original file.
        plain: whether the tokenizer must not add tokens to a text.
    """
    refers_to_code = "auto_map" in config
    allowed = {
        name: value
        for name, value in config.items()
        if name in _ALLOWED_FIELDS and not (plain and name in _FIELDS_ADDING_TOKENS)
    }
    if plain or refers_to_code or not isinstance(allowed.get("tokenizer_class"), str):
        allowed["tokenizer_class"] = TOKENIZER_CLASS
    return allowed


def filter_special_tokens(tokens: dict[str, Any]) -> dict[str, Any]:
    """Return a special_tokens_map.json with only the known special tokens."""
    return {name: value for name, value in tokens.items() if name in _SPECIAL_TOKEN_FIELDS}


def plain_tokenizer_json(content: bytes) -> bytes:
    """Return a tokenizer.json that encodes as in training, without added tokens, truncation or padding.

    Args:
        content: contents of the original file. They are returned unchanged if they already have this form.
    """
    tokenizer = json.loads(content)
    replacements = {
        "post_processor": _plain_post_processor(tokenizer.get("post_processor")),
        **{name: None for name in ("truncation", "padding") if name in tokenizer},
    }
    if all(tokenizer.get(name) == value for name, value in replacements.items()):
        return content
    return (json.dumps(tokenizer | replacements, indent=2, ensure_ascii=False) + "\n").encode()


def _plain_post_processor(processor: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a post-processor that adds no tokens. Its handling of offsets is kept."""
    if processor is None:
        return None
    kind = processor["type"]
    if kind in ("TemplateProcessing", "BertProcessing"):
        return None
    if kind == "RobertaProcessing":
        offsets = {name: processor[name] for name in ("add_prefix_space", "trim_offsets")}
        return {"type": "ByteLevel", **offsets, "use_regex": True}
    if kind == "Sequence":
        parts = [_plain_post_processor(part) for part in processor["processors"]]
        return {**processor, "processors": [part for part in parts if part is not None]}
    return processor
