"""Registry of mixers by name. Each mixer's file registers itself; `load_all` imports them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import megatron_ext.mixers
from megatron_ext.config.traits import MixerTraits
from megatron_ext.mixers.core.base import Mixer
from megatron_ext.mixers.core.settings import SETTINGS
from megatron_ext.utils.registration import add_entry, import_modules


@dataclass(frozen=True)
class MixerEntry:
    """Registered mixer.

    Attributes:
        name: its name in `model.pattern` and under `mixers.`.
        module: class that replaces self-attention.
        config_type: class of its settings.
    """

    name: str
    module: type[Mixer]
    config_type: type

    @property
    def traits(self) -> MixerTraits:
        """Traits of the class."""
        return self.module.traits


MIXERS: dict[str, MixerEntry] = {}


def register(name: str, config_type: type | None = None) -> Callable[[type[Mixer]], type[Mixer]]:
    """Return a class decorator that registers a mixer under a name.

    Args:
        name: see `MixerEntry`.
        config_type: class of its settings; None: the entry of `settings.SETTINGS`.

    Raises:
        ValueError: the name is taken (raised by the decorator).
    """

    def add(module: type[Mixer]) -> type[Mixer]:
        add_entry(MIXERS, name, MixerEntry(name, module, config_type or SETTINGS[name]), "mixers")
        return module

    return add


def load_all() -> dict[str, MixerEntry]:
    """Import every module of this package, so that each mixer registers itself, and return the mixers by name."""
    import_modules(megatron_ext.mixers)
    return MIXERS
