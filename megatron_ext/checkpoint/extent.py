"""Limits for values from untrusted files: nesting, cycles, and exponential expansion by shared references."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

MAX_DEPTH = 100
"""Deepest nesting of containers. Python code that traverses them is recursive."""

MAX_ITEMS = 10_000_000
"""Limit of the items of a value. An item that is referenced several times is counted each time."""

MAX_SHARING = 10
"""Limit of the items counted at each reference, relative to the items counted once. It applies above `MAX_ITEMS`.

Checkpoint indexes share almost no items.
"""


_CONTAINERS = {list, tuple, dict, OrderedDict, Namespace}
"""Exact container types. `torch.Size` is not among them because it is short and contains only numbers."""


class RefusedPickle(ValueError):
    """Damaged pickle, or a pickle with unsupported content. The message is one line."""


def check_extent(value: Any, kinds: Collection[type] = ()) -> None:
    """Refuse a value that is too deep or too large for code that follows every reference.

    Sixty nested lists that each contain the next one twice take some hundred bytes of a file but expand to 2^60 items.
    Copying, comparing or printing them would not terminate. This check visits each container once.

    Args:
        value: value made of lists, tuples, dictionaries, namespaces and instances. Any other value counts as one item.
        kinds: classes whose instances' attributes are visited.

    Raises:
        RefusedPickle: containers are nested deeper than `MAX_DEPTH`, are cyclic, or expand to more than `MAX_ITEMS`
            items and to more than `MAX_SHARING` times their items counted once.
    """
    root = _Container([value], kinds)
    counted: dict[int, tuple[int, int]] = {}  # by id of a counted container: items, depth
    path, path_ids, num_items = [root], {id(root.container)}, 1
    while path:
        top = path[-1]
        if not top.pending:
            path.pop()
            path_ids.remove(id(top.container))
            counted[id(top.container)] = (top.items, top.depth)
            if path:
                path[-1].add(top.items, top.depth)
            continue
        container = top.pending.pop()
        if id(container) in path_ids:
            raise RefusedPickle("has a container that contains itself")
        if id(container) not in counted:
            inner_container = _Container(container, kinds)
            num_items += inner_container.items
            if inner_container.pending:
                _check_depth(len(path))
                path.append(inner_container)
                path_ids.add(id(container))
                continue
            counted[id(container)] = (inner_container.items, inner_container.depth)
        top.add(*counted[id(container)])
    _check_depth(root.depth - 1)
    if root.items > max(MAX_ITEMS, MAX_SHARING * num_items):
        raise RefusedPickle(f"shares its parts so often that it expands to more than {MAX_ITEMS} items")


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RefusedPickle(f"nests containers deeper than {MAX_DEPTH}")


class _Container:
    """Container that is being counted.

    Attributes:
        items: items counted so far, shared ones at each reference.
        depth: depth of the containers counted so far, including this one.
        pending: inner containers that are still to be counted.
    """

    def __init__(self, container: Any, kinds: Collection[type]) -> None:
        parts = _parts(container)
        self.container, self.items, self.depth = container, len(parts), 1
        self.pending = [part for part in parts if type(part) in _CONTAINERS or type(part) in kinds]

    def add(self, items: int, depth: int) -> None:
        """Add the counts of an inner container."""
        self.items += items
        self.depth = max(self.depth, depth + 1)


def _parts(container: Any) -> Collection[Any]:
    if isinstance(container, list | tuple):
        return container
    return (container if isinstance(container, dict) else vars(container)).values()
