"""Suggestions for unknown names, and the error for an unknown mixer."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from megatron_ext.utils.errors import UserError


def suggest(name: str, known: Iterable[str]) -> str:
    """Suggest the closest known name, or list all of them.

    Args:
        name: the unknown name.
        known: the known names.

    Returns:
        Hint for an error message: "did you mean ...?" or "known: ...".
    """
    names = list(known)
    close = _same_ending(name, names) or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known: {', '.join(names)}"


def unknown_mixer(where: str, name: str, known: Iterable[str]) -> UserError:
    """Build the error for a mixer name that is not registered.

    Args:
        where: the field that names the mixer.
        name: the name.
        known: the registered names.

    Returns:
        The error, for the caller to raise.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}? " if close else ""
    return UserError(where, f"there is no mixer {name!r}", f"{hint}known: {', '.join(names)}")


def _same_ending(name: str, names: list[str]) -> list[str]:
    """Return up to 3 dotted names whose last part resembles that of `name`, whatever their section."""
    by_ending: dict[str, list[str]] = {}
    for dotted in names:
        by_ending.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    close = difflib.get_close_matches(name.rpartition(".")[2], by_ending, n=1, cutoff=0.75)
    return by_ending[close[0]][:3] if close else []
