"""A tokenizer's files as an export carries them: what encodes text, and no name of anybody's code."""

from __future__ import annotations

import json
from typing import Any

TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""transformers' class that does what a tokenizer.json says."""

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
"""Of tokenizer_config.json: values that a tokenizer of transformers takes. `auto_map` and others name code."""

_ADDING = {"add_bos_token", "add_eos_token"}


def exported_config(config: dict[str, Any], *, plain: bool) -> dict[str, Any]:
    """A tokenizer_config.json without what is not of the list.

    Args:
        config: whoever wrote it.
        plain: whether the tokenizer is to add no token to a text.
    """
    names_code = "auto_map" in config
    kept = {name: value for name, value in config.items() if name in _FIELDS and not (plain and name in _ADDING)}
    if plain or names_code or not isinstance(kept.get("tokenizer_class"), str):
        kept["tokenizer_class"] = TOKENIZER_CLASS
    return kept


def exported_tokens(tokens: dict[str, Any]) -> dict[str, Any]:
    """A special_tokens_map.json without what is none."""
    return {name: value for name, value in tokens.items() if name in _TOKENS}


def without_template(content: bytes) -> bytes:
    """A tokenizer.json that encodes as training does: no token is added to a text, nothing is cut off or filled up.

    Args:
        content: of the file; the same bytes are returned where nothing is to be changed.
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
    """A post-processor without those parts that add tokens; what it does to offsets stays."""
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
