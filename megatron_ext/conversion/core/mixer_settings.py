"""Lookup of mixer settings classes without importing the built-in mixers."""

from __future__ import annotations

from typing import Any

from megatron_ext.config.suggest import unknown_mixer
from megatron_ext.mixers.core.settings import SETTINGS


def settings_type(name: str, where: str) -> type[Any]:
    """Return the settings class of a mixer.

    Args:
        name: name of the mixer.
        where: field with the name, for the error message.

    Raises:
        UserError: there is no such mixer.
    """
    kind = SETTINGS.get(name)
    if kind is not None:
        return kind
    # A mixer from a file of the user, or an unknown one.
    from megatron_ext.platform.device import before_megatron

    before_megatron()
    from megatron_ext.mixers.core.registry import load_all

    known = load_all()
    if name not in known:
        raise unknown_mixer(where, name, known)
    return known[name].config_type
