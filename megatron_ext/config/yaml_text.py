"""Reading YAML from untrusted files: plain values only, of bounded size."""

from __future__ import annotations

import math
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MAX_BYTES = 256 << 10
"""Largest file. A sweep of a thousand runs with three fields each has a third of it."""

MAX_ENTRIES = 10_000
"""Most lines, commas and brackets of a text. The parser takes about 0.15 ms for each."""

MAX_DEPTH = 100
"""Most nested brackets. The parser's time is quadratic in the depth."""

MAX_NODES = 50_000
"""Most values and keys, with aliases expanded."""

_ENTRY = re.compile(r"[,\n\[{?]|- ")
_BRACKET = re.compile(r"[\[\]{}]")


class TooLargeError(YAMLError):
    """Text larger than any configuration, or with too many values when its aliases are expanded."""


class _Constructor(SafeConstructor):
    """Constructor for YAML 1.2's core schema. Without timestamps, `run.name: 2026-01-31` is text."""

    def construct_document(self, node: Node) -> Any:
        """Return the plain values of a document after checking its size."""
        _check_size(node)
        return super().construct_document(node)


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def parse_yaml(text: str) -> Any:
    """Return the plain values of a YAML text.

    Raises:
        YAMLError, ValueError, RecursionError: the text is not YAML, too large, or nested too deeply.
    """
    _check_text(text)
    yaml = YAML(typ="safe", pure=True)  # pure: the C parser implements YAML 1.1, where 1e-3 is text
    yaml.Constructor = _Constructor
    return yaml.load(text)


def read_yaml(path: Path) -> str:
    """Return the text of a YAML file of limited size.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read.
        TooLargeError: it is larger than `MAX_BYTES`.
    """
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise TooLargeError(f"more than {MAX_BYTES >> 10} KiB")
    return content.decode("utf-8")


def _check_text(text: str) -> None:
    """Refuse text that is slow to parse, without parsing it. Brackets and commas inside quotes also count."""
    if len(text) > MAX_BYTES:
        raise TooLargeError(f"more than {MAX_BYTES >> 10} KiB")
    if sum(1 for _ in _ENTRY.finditer(text)) > MAX_ENTRIES:
        raise TooLargeError(f"more than {MAX_ENTRIES} entries")
    depths = accumulate(1 if bracket[0] in "[{" else -1 for bracket in _BRACKET.finditer(text))
    if max(depths, default=0) > MAX_DEPTH:
        raise TooLargeError(f"nested more than {MAX_DEPTH} deep")


def _check_size(root: Node) -> None:
    """Refuse a document that is too large with its aliases expanded. Takes linear time in the unexpanded size."""
    sizes: dict[int, float] = {}
    waiting = [(root, False)]
    while waiting:
        node, is_counted = waiting.pop()
        inner = _inner(node)
        if is_counted:
            sizes[id(node)] = total = 1 + sum(sizes[id(one)] for one in inner)
            if total == math.inf:
                raise TooLargeError("an alias refers to a value that contains it")
            if total > MAX_NODES:
                raise TooLargeError(f"more than {MAX_NODES} values with aliases expanded")
        elif id(node) not in sizes:
            sizes[id(node)] = math.inf  # marks a node in progress, to detect recursion
            waiting.append((node, True))
            waiting += [(one, False) for one in inner]


def _inner(node: Node) -> list[Node]:
    if isinstance(node, MappingNode):
        return [one for pair in node.value for one in pair]
    if isinstance(node, SequenceNode):
        return list(node.value)
    assert isinstance(node, ScalarNode)
    return []
