"""Bounds on values read from untrusted files: nesting, cycles, and exponential expansion by shared parts."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

MAX_DEPTH = 100
"""Deepest nesting of containers. Python code that traverses them is recursive."""

MAX_ITEMS = 10_000_000
"""Most items of a value with shared items counted each time, if the file itself has few."""

MAX_SHARING = 10
"""Largest ratio of items counted with sharing to items in a larger file. Checkpoint indexes share almost none."""


_CONTAINERS = {list, tuple, dict, OrderedDict, Namespace}
"""Exact container types. `torch.Size` is not among them because it is short and contains only numbers."""


class RefusedPickle(ValueError):
    """Damaged pickle, or a pickle with unsupported content. The message is one line."""


def check_extent(value: Any, kinds: Collection[type] = ()) -> None:
    """Refuse a value that is too deep or too large for code that follows every reference.

    Sixty lists that each contain the previous one twice take some hundred bytes of a file but expand to 2^60 items.
    Copying, comparing or printing them would not terminate. This check visits each container once.

    Args:
        value: value made of lists, tuples, dictionaries, namespaces and instances. Anything else is one item.
        kinds: classes whose instances' attributes are visited.

    Raises:
        RefusedPickle: containers are nested deeper than `MAX_DEPTH`, are cyclic, or expand to more than `MAX_ITEMS`
            items and to more than `MAX_SHARING` times the items they hold.
    """
    root = _Open([value], kinds)
    known: dict[int, tuple[int, int]] = {}  # by id of a counted container: items, depth
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
            raise RefusedPickle("has a container that contains itself")
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
    """Container whose items are not all counted yet.

    Attributes:
        items: items counted so far, with shared ones counted each time.
        depth: depth of the containers counted so far, including this one.
        inner: inner containers that are still to be counted.
    """

    def __init__(self, container: Any, kinds: Collection[type]) -> None:
        parts = _parts(container)
        self.container, self.items, self.depth = container, len(parts), 1
        self.inner = [part for part in parts if type(part) in _CONTAINERS or type(part) in kinds]

    def add(self, items: int, depth: int) -> None:
        """Add the counts of an inner container."""
        self.items += items
        self.depth = max(self.depth, depth + 1)


def _parts(container: Any) -> Collection[Any]:
    if isinstance(container, list | tuple):
        return container
    return (container if isinstance(container, dict) else vars(container)).values()
