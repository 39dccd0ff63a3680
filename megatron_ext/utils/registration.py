"""Registration by name, and import of packages whose modules register what they define."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import MutableMapping
from functools import cache
from types import ModuleType
from typing import TypeVar

Entry = TypeVar("Entry")


@cache  # callers load a registry at each look-up, and listing a folder takes a millisecond
def import_modules(package: ModuleType) -> None:
    """Import every module directly inside a package, in the order of their names. Later calls do nothing."""
    for info in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{info.name}")


def add_entry(registry: MutableMapping[str, Entry], name: str, entry: Entry, kind: str) -> None:
    """Add an entry to a registry.

    Args:
        registry: the registry.
        name: name of the entry.
        entry: the entry.
        kind: plural noun for the entries, for the message.

    Raises:
        ValueError: the name is taken.
    """
    if name in registry:
        raise ValueError(f"two {kind} are called {name!r}: {registry[name]} and {entry}")
    registry[name] = entry
