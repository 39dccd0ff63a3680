"""Filters for exported tokenizer files: they keep what is needed to encode text, and remove references to code."""

from __future__ import annotations

import json
from typing import Any

TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""Tokenizer class of transformers that is fully defined by tokenizer.json."""

_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    *("additional_special_tokens", "extra_special_tokens"),
)

_FIELDS = {
    *_TOKENS,
    *("tokenizer_class", "added_tokens_decoder", "chat_template", "model_max_length", "model_input_names"),
    *("clean_up_tokenization_spaces", "spaces_between_special_tokens", "split_special_tokens", "add_prefix_space"),
    *("padding_side", "truncation_side", "do_lower_case", "strip_accents", "tokenize_chinese_chars"),
    *("add_bos_token", "add_eos_token", "legacy", "errors"),
}
"""Allowed fields of tokenizer_config.json: arguments of transformers' tokenizers.

`auto_map` and other fields that refer to code are excluded.
"""

_ADDING = {"add_bos_token", "add_eos_token"}


def exported_config(config: dict[str, Any], *, plain: bool) -> dict[str, Any]:
    """Return a tokenizer_config.json with only the allowed fields.

    Args:
        config: contents of the original file.
        plain: whether the tokenizer must not add tokens to a text.
    """
    names_code = "auto_map" in config
    kept = {name: value for name, value in config.items() if name in _FIELDS and not (plain and name in _ADDING)}
    if plain or names_code or not isinstance(kept.get("tokenizer_class"), str):
        kept["tokenizer_class"] = TOKENIZER_CLASS
    return kept


def exported_tokens(tokens: dict[str, Any]) -> dict[str, Any]:
    """Return a special_tokens_map.json with only the known special tokens."""
    return {name: value for name, value in tokens.items() if name in _TOKENS}


def without_template(content: bytes) -> bytes:
    """Return a tokenizer.json that encodes as in training, without added tokens, truncation or padding.

    Args:
        content: contents of the original file. They are returned unchanged if they already have this form.
    """
    tokenizer = json.loads(content)
    changed = {
        "post_processor": _without_tokens(tokenizer.get("post_processor")),
        **{name: None for name in ("truncation", "padding") if name in tokenizer},
    }
    if all(tokenizer.get(name) == value for name, value in changed.items()):
        return content
    return (json.dumps(tokenizer | changed, indent=2, ensure_ascii=False) + "\n").encode()


def _without_tokens(processor: dict[str, Any] | None) -> dict[str, Any] | None:
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
        inner = [_without_tokens(one) for one in processor["processors"]]
        return {**processor, "processors": [one for one in inner if one is not None]}
    return processor
