"""The classes of mixers' settings, found without importing the mixers where these are ours."""

from __future__ import annotations

from typing import Any

from megatron_ext.config.suggest import unknown_mixer
from megatron_ext.mixers.settings import SETTINGS


def settings_type(name: str, where: str) -> type[Any]:
    """The class of a mixer's own configuration.

    Args:
        name: the mixer's.
        where: the field that names it, for the message.

    Raises:
        UserError: there is no such mixer.
    """
    kind = SETTINGS.get(name)
    if kind is not None:
        return kind
    # Of a file of its own, or of none.
    from megatron_ext.platform import before_megatron

    before_megatron()
    from megatron_ext.mixers.registry import load_all

    known = load_all()
    if name not in known:
        raise unknown_mixer(where, name, known)
    return known[name].config_type
