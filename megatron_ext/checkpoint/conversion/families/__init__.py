"""The families of other libraries: which of them can hold a model of ours, and which one an architecture is.

A family is a line in `_FAMILIES`; its file is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from megatron_ext.checkpoint.conversion.family import Family, SavedModel
from megatron_ext.errors import UserError

_FAMILIES = {
    "LlamaForCausalLM": "llama:Llama",
}
"""By architecture, file and class; the first one that can hold a model is taken."""


def family_of_architecture(architecture: str, where: str) -> Family:
    """The family of an `architectures` entry.

    Raises:
        UserError: there is none.
    """
    if architecture not in _FAMILIES:
        raise UserError(where, f"architecture {architecture} is not known here", f"give one of {', '.join(_FAMILIES)}")
    return _load(architecture)


def family_for(saved: SavedModel) -> Family:
    """The first family that can hold a model.

    Raises:
        UserError: there is none; says why of each that is near.
    """
    reasons = []
    for family in families():
        reason = family.why_not(saved)
        if reason is None:
            return family
        reasons.append(f"{family.architecture}: {reason}")
    mend = "export another model; SelectronForCausalLM, which will hold every pattern, is not here yet"
    raise UserError("model.pattern", f"{saved.model.pattern!r} fits no architecture ({'; '.join(reasons)})", mend)


def families() -> Iterator[Family]:
    """All of them, in the order in which they are tried."""
    return (_load(architecture) for architecture in _FAMILIES)


def _load(architecture: str) -> Family:
    module, _, name = _FAMILIES[architecture].partition(":")
    family: Family = getattr(import_module(f"{__name__}.{module}"), name)()
    return family
