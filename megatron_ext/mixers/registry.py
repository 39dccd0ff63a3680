"""The mixers by name. A mixer's file registers itself; `MIXERS` holds them all once this module is imported."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import megatron_ext.mixers
from megatron_ext.mixers.base import Mixer
from megatron_ext.mixers.settings import SETTINGS


@dataclass(frozen=True)
class MixerEntry:
    """A mixer as the configuration, the specs and the report know it.

    Attributes:
        name: in `model.pattern` and under `mixers.`.
        module: what takes the place of self-attention.
        config_type: its own small configuration.
    """

    name: str
    module: type[Mixer]
    config_type: type

    @property
    def gathers_keys_and_values(self) -> bool:
        """Whether context parallelism can do without heads that divide."""
        return self.module.gathers_keys_and_values

    @property
    def hands_on_states(self) -> bool:
        """Whether context parallelism can hand states on."""
        return self.module.hands_on_states

    @property
    def chunk_field(self) -> str | None:
        """The field with the size of the chunks that context parallelism can fetch; None: it fetches none."""
        return self.module.chunk_field

    @property
    def units_are_groups(self) -> bool:
        """Whether a unit is a query group."""
        return self.module.units_are_groups

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether a token can be kept from other documents of its sample."""
        return self.module.keeps_documents_apart


MIXERS: dict[str, MixerEntry] = {}


def register(name: str, config_type: type | None = None) -> Callable[[type[Mixer]], type[Mixer]]:
    """Class decorator: make a mixer known under a name.

    Args:
        name: see `MixerEntry`.
        config_type: its own small configuration; None: that of `settings.SETTINGS`.
    """

    def add(module: type[Mixer]) -> type[Mixer]:
        if name in MIXERS:
            raise ValueError(f"two mixers are called {name!r}: {MIXERS[name].module} and {module}")
        MIXERS[name] = MixerEntry(name, module, config_type or SETTINGS[name])
        return module

    return add


def load_all() -> dict[str, MixerEntry]:
    """Import every file of this folder, so that each registers itself, and return the mixers by name."""
    for info in pkgutil.iter_modules(megatron_ext.mixers.__path__):
        importlib.import_module(f"{megatron_ext.mixers.__name__}.{info.name}")
    return MIXERS
