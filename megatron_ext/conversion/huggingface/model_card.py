"""README.md of an exported model, with instructions to load it."""

from __future__ import annotations

from megatron_ext.conversion.core.family import Family, ShipsCode
from megatron_ext.conversion.core.output_folder import README_MARK
from megatron_ext.conversion.huggingface.families.fla_models import FlaTransformer
from megatron_ext.conversion.huggingface.families.rwkv7 import RWKV7Family


def needs(family: Family) -> str | None:
    """Return one line on what loading a model of this family requires besides transformers; None: nothing."""
    if isinstance(family, FlaTransformer | RWKV7Family):
        return (
            f"{family.architecture} is flash-linear-attention's: install it, and `import fla` before "
            "AutoModelForCausalLM.from_pretrained, which does not know the model otherwise"
        )
    if isinstance(family, ShipsCode):
        return (
            f"{family.architecture} is made by the Python files beside the weights: "
            "AutoModelForCausalLM.from_pretrained takes trust_remote_code=True"
        )
    return None


def card(family: Family, *, with_tokenizer: bool, plain: bool) -> str:
    """Return the text of README.md.

    Args:
        family: family of the exported model.
        with_tokenizer: whether the folder contains a tokenizer.
        plain: whether the tokenizer adds no tokens to a text.
    """
    lines = ["import fla  # registers the model"] if isinstance(family, FlaTransformer | RWKV7Family) else []
    names = ["AutoModelForCausalLM", *(["AutoTokenizer"] if with_tokenizer else [])]
    lines += [f"from transformers import {', '.join(names)}", ""]
    trusted = ", trust_remote_code=True" if isinstance(family, ShipsCode) else ""
    lines += [f'model = AutoModelForCausalLM.from_pretrained("."{trusted})']
    if with_tokenizer:
        lines += ['tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code=False)']
    text = [README_MARK, f"# {family.architecture}", "", "```python", *lines, "```", ""]
    if (said := needs(family)) is not None:
        text += [f"{said[0].upper()}{said[1:]}.", ""]
    if with_tokenizer:
        text += [
            "The tokenizer is a `tokenizer.json` and needs no code; `trust_remote_code=False` keeps transformers from",
            "asking for the model's.",
            "",
        ]
    if with_tokenizer and plain:
        text += [
            "It adds no token to a text, as in training: a document followed the token that ended the one before",
            "(`eos_token`).",
            "",
        ]
    return "\n".join(text)
