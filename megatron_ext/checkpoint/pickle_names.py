"""Entries of the list of classes and functions that the restricted unpickler accepts."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.checkpoint.extent import RefusedPickle


@dataclass(frozen=True, eq=False)
class AllowedName:
    """Class or function that a pickle may name.

    Attributes:
        call: builds a value from the pickle's arguments. None: it may not be called.
        new: builds an empty instance for `fill`. None: not allowed.
        instance_type: type of the instances that `fill` accepts.
        fill: validates a state and stores it in an instance.
    """

    call: Callable[..., Any] | None = None
    new: Callable[[], Any] | None = None
    instance_type: type | None = None
    fill: Callable[[Any, Any], None] | None = None


AllowedNames = Mapping[tuple[str, str], Any]
"""Allowed names by (module, name): an `AllowedName`, or a constant that is used as it is."""


class Placeholder:
    """Empty stand-in for an instance whose content is ignored."""


def ignored_class() -> AllowedName:
    """Return an entry for a class whose arguments and state are ignored."""
    return AllowedName(lambda *_: Placeholder(), Placeholder, Placeholder, lambda instance, state: None)


def ordered_dict() -> AllowedName:
    """Return an entry for `OrderedDict`. Items are set one by one: its constructor would hash unchecked keys."""

    def empty() -> OrderedDict[Any, Any]:
        return OrderedDict()

    return AllowedName(empty, None, OrderedDict, lambda instance, state: None)


def argparse_namespace() -> AllowedName:
    """Return an entry for `argparse.Namespace` whose attribute names are identifiers."""

    def fill(instance: Namespace, state: Any) -> None:
        if type(state) is not dict or not all(type(key) is str and key.isidentifier() for key in state):
            raise RefusedPickle("has a Namespace with invalid attribute names")
        vars(instance).update(state)

    return AllowedName(Namespace, Namespace, Namespace, fill)
