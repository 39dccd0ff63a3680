"""Bounds on values read from untrusted files: nesting, cycles, and shared parts that multiply."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

MAX_DEPTH = 100
"""Containers within containers; Python's own traversals of deeper ones recurse."""

MAX_ITEMS = 10_000_000
"""Items of a value with shared ones counted each time, where the file itself holds few."""

MAX_SHARING = 10
"""How many times as many items as it holds a larger file may stand for; indexes of checkpoints share next to none."""


_CONTAINERS = {list, tuple, dict, OrderedDict, Namespace}
"""Exact types: a `torch.Size` is short, and holds numbers alone."""


class RefusedPickle(ValueError):
    """A pickle is damaged, or holds what this reader does not read; the text is one line."""


def check_extent(value: Any, kinds: Collection[type] = ()) -> None:
    """Refuse a value that code which follows every reference would not get through.

    Sixty lists, each of which holds the one before twice, take some hundred bytes of a file and stand for 2^60 items:
    copying, comparing or printing them would not end. The check visits each container once.

    Args:
        value: of lists, tuples, dictionaries, namespaces and instances; anything else is one item.
        kinds: classes whose instances' attributes are visited.

    Raises:
        RefusedPickle: containers are nested deeper than `MAX_DEPTH`, hold themselves, or stand for more than
            `MAX_ITEMS` items and `MAX_SHARING` times as many as there are.
    """
    root = _Open([value], kinds)
    known: dict[int, tuple[int, int]] = {}  # by id of a container that is counted: items it stands for, depth
    path, on_path, held = [root], {id(root.container)}, 1
    while path:
        top = path[-1]
        if not top.inner:
            path.pop()
            on_path.remove(id(top.container))
            known[id(top.container)] = (top.items, top.depth)
            if path:
                path[-1].add(top.items, top.depth)
            continue
        container = top.inner.pop()
        if id(container) in on_path:
            raise RefusedPickle("has a container that holds itself")
        if id(container) not in known:
            within = _Open(container, kinds)
            held += within.items
            if within.inner:
                _check_depth(len(path))
                path.append(within)
                on_path.add(id(container))
                continue
            known[id(container)] = (within.items, within.depth)
        top.add(*known[id(container)])
    _check_depth(root.depth - 1)
    if root.items > max(MAX_ITEMS, MAX_SHARING * held):
        raise RefusedPickle(f"shares its parts so often that it stands for more than {MAX_ITEMS} items")


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RefusedPickle(f"nests containers deeper than {MAX_DEPTH}")


class _Open:
    """A container of which not all is counted yet.

    Attributes:
        items: that it stands for, as far as they are counted.
        depth: of the containers that are counted, with this one.
        inner: containers in it that are yet to be counted.
    """

    def __init__(self, container: Any, kinds: Collection[type]) -> None:
        parts = _parts(container)
        self.container, self.items, self.depth = container, len(parts), 1
        self.inner = [part for part in parts if type(part) in _CONTAINERS or type(part) in kinds]

    def add(self, items: int, depth: int) -> None:
        """Count one of the containers in it."""
        self.items += items
        self.depth = max(self.depth, depth + 1)


def _parts(container: Any) -> Collection[Any]:
    if isinstance(container, list | tuple):
        return container
    return (container if isinstance(container, dict) else vars(container)).values()
