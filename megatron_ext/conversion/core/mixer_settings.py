"""Lookup of mixer settings classes without importing the built-in mixers."""

from __future__ import annotations

from typing import Any

from megatron_ext.config.suggest import unknown_mixer
from megatron_ext.mixers.core.settings import settings_class


def find_settings_class(name: str, where: str) -> type[Any]:
    """Return the settings class of a mixer.

    Args:
        name: name of the mixer.
        where: field with the name, for the error message.

    Raises:
        UserError: there is no such mixer.
    """
    found = settings_class(name)
    if found is not None:
        return found
    from megatron_ext.mixers.core.registry import load_all  # not before: it imports torch

    raise unknown_mixer(where, name, load_all())
