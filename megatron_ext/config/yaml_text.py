"""YAML from files that others may have written: plain values alone, of a bounded size."""

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
"""Of a file; a sweep of a thousand runs, three fields each, has a third of it."""

MAX_ENTRIES = 10_000
"""Lines, commas and brackets of a text. The parser takes some 0.15 ms for each."""

MAX_DEPTH = 100
"""Brackets open at once. The parser's time grows with their square."""

MAX_NODES = 50_000
"""Values and keys, with each alias counted as all that it stands for."""

_ENTRY = re.compile(r"[,\n\[{?]|- ")
_BRACKET = re.compile(r"[\[\]{}]")


class TooLargeError(YAMLError):
    """A text is larger than any configuration, or its aliases stand for more values than one has."""


class _Constructor(SafeConstructor):
    """YAML 1.2's core schema: no timestamps, so that `run.name: 2026-01-31` is the text it looks like."""

    def construct_document(self, node: Node) -> Any:
        """Plain values of a document that is not too large."""
        _check_size(node)
        return super().construct_document(node)


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def parse_yaml(text: str) -> Any:
    """Plain values of a YAML text.

    Raises:
        YAMLError, ValueError, RecursionError: it is no YAML, too large, or nested too deeply.
    """
    _check_text(text)
    yaml = YAML(typ="safe", pure=True)  # pure: the C parser speaks YAML 1.1, to which 1e-3 is text
    yaml.Constructor = _Constructor
    return yaml.load(text)


def read_yaml(path: Path) -> str:
    """The text of a YAML file, as far as it may be read.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
        TooLargeError: it is larger than any configuration.
    """
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise TooLargeError(f"more than {MAX_BYTES >> 10} KiB")
    return content.decode("utf-8")


def _check_text(text: str) -> None:
    """Refuse, without parsing it, what would take the parser long; brackets and commas in quotes count, too."""
    if len(text) > MAX_BYTES:
        raise TooLargeError(f"more than {MAX_BYTES >> 10} KiB")
    if sum(1 for _ in _ENTRY.finditer(text)) > MAX_ENTRIES:
        raise TooLargeError(f"more than {MAX_ENTRIES} entries")
    depths = accumulate(1 if bracket[0] in "[{" else -1 for bracket in _BRACKET.finditer(text))
    if max(depths, default=0) > MAX_DEPTH:
        raise TooLargeError(f"nested more than {MAX_DEPTH} deep")


def _check_size(root: Node) -> None:
    """Refuse a document whose aliases, written out, would be too large; in a time that they do not lengthen."""
    sizes: dict[int, float] = {}
    waiting = [(root, False)]
    while waiting:
        node, is_counted = waiting.pop()
        inner = _inner(node)
        if is_counted:
            sizes[id(node)] = total = 1 + sum(sizes[id(one)] for one in inner)
            if total == math.inf:
                raise TooLargeError("an alias stands inside what it is an alias of")
            if total > MAX_NODES:
                raise TooLargeError(f"more than {MAX_NODES} values, aliases written out")
        elif id(node) not in sizes:
            sizes[id(node)] = math.inf  # of one that is inside itself
            waiting.append((node, True))
            waiting += [(one, False) for one in inner]


def _inner(node: Node) -> list[Node]:
    if isinstance(node, MappingNode):
        return [one for pair in node.value for one in pair]
    if isinstance(node, SequenceNode):
        return list(node.value)
    assert isinstance(node, ScalarNode)
    return []
