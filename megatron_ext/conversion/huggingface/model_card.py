"""README.md of an exported model, with instructions to load it."""

from __future__ import annotations

from megatron_ext.conversion.core.family import Family, HasModelCode
from megatron_ext.conversion.core.output_folder import README_MARK
from megatron_ext.conversion.huggingface.families.fla_models import FlaTransformer
from megatron_ext.conversion.huggingface.families.rwkv7 import RWKV7Family


def loading_note(family: Family) -> str | None:
    """Return one line about requirements of loading a model of this family besides transformers; None if none."""
    if isinstance(family, FlaTransformer | RWKV7Family):
        return (
            f"{family.architecture} is part of flash-linear-attention: install it, and `import fla` before "
            "AutoModelForCausalLM.from_pretrained, to register the model"
        )
    if isinstance(family, HasModelCode):
        return (
            f"{family.architecture} is implemented by the Python files beside the weights: "
            "AutoModelForCausalLM.from_pretrained needs trust_remote_code=True"
        )
    return None


def format_card(family: Family, *, has_tokenizer: bool, is_plain: bool) -> str:
    """Return the text of README.md.

    Args:
        family: family of the exported model.
        has_tokenizer: whether the folder contains a tokenizer.
        is_plain: whether the tokenizer adds no tokens to a text.
    """
    lines = ["import fla  # registers the model"] if isinstance(family, FlaTransformer | RWKV7Family) else []
    names = ["AutoModelForCausalLM", *(["AutoTokenizer"] if has_tokenizer else [])]
    lines += [f"from transformers import {', '.join(names)}", ""]
    trusted = ", trust_remote_code=True" if isinstance(family, HasModelCode) else ""
    lines += [f'model = AutoModelForCausalLM.from_pretrained("."{trusted})']
    if has_tokenizer:
        lines += ['tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code=False)']
    text = [README_MARK, f"# {family.architecture}", "", "```python", *lines, "```", ""]
    if (note := loading_note(family)) is not None:
        text += [f"{note[0].upper()}{note[1:]}.", ""]
    if has_tokenizer:
        text += [
            "The tokenizer is a `tokenizer.json` and needs no code; `trust_remote_code=False` keeps transformers from",
            "asking for the model's.",
            "",
        ]
    if has_tokenizer and is_plain:
        text += [
            "It adds no token to a text. In training, each document followed the token that ends the previous document",
            "(`eos_token`).",
            "",
        ]
    return "\n".join(text)
