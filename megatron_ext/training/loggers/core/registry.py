"""Registry of loggers by name. Each logger's file registers itself; `load_all` imports them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import megatron_ext.training.loggers
from megatron_ext.training.loggers.core.base import Logger
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.registration import add_entry, import_modules

FIELD = "logging.backends"

ALWAYS_ON = ("jsonl", "progress")
"""Loggers that every run has. Naming them in `logging.backends` has no further effect."""


@dataclass(frozen=True)
class LoggerEntry:
    """Registered logger.

    Attributes:
        name: name of the logger in `logging.backends`.
        kind: class of the logger.
        package: import name of the optional package that the logger needs, or None.
        install: command that installs the package.
    """

    name: str
    kind: type[Logger]
    package: str | None = None
    install: str = ""


LOGGERS: dict[str, LoggerEntry] = {}


def register(name: str, package: str | None = None, install: str = "") -> Callable[[type[Logger]], type[Logger]]:
    """Return a class decorator that registers a logger under a name.

    Args:
        name: see `LoggerEntry`.
        package: see `LoggerEntry`.
        install: see `LoggerEntry`. Empty: `pip install` of the package.

    Raises:
        ValueError: the name is taken (raised by the decorator).
    """

    def add(kind: type[Logger]) -> type[Logger]:
        entry = LoggerEntry(name, kind, package, install or f"pip install {package}")
        add_entry(LOGGERS, name, entry, "loggers")
        return kind

    return add


def load_all() -> dict[str, LoggerEntry]:
    """Import every module of this package, so that each logger registers itself, and return the loggers by name."""
    import_modules(megatron_ext.training.loggers)
    return LOGGERS


def check_loggers(names: Sequence[str]) -> list[LoggerEntry]:
    """Return the loggers of `logging.backends`, each once and without those that are always on.

    The optional packages are looked up but not imported.

    Raises:
        UserError: a name is unknown, or the package of a logger is not installed.
    """
    known = load_all()
    for name in names:
        if name not in known:
            choices = ", ".join(sorted(known.keys() - set(ALWAYS_ON)))
            raise UserError(FIELD, f"no logger {name!r}", f"choose from: {choices}")
        package = known[name].package
        if package is not None and find_spec(package) is None:
            raise UserError(FIELD, f"{name} needs the package {package}, which is not installed", known[name].install)
    return [known[name] for name in dict.fromkeys(names) if name not in ALWAYS_ON]
