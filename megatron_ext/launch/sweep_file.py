"""What a sweep is: a configuration, and runs that differ from it in some fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from itertools import product
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from megatron_ext.config.load import read_tree
from megatron_ext.config.schema import STRICT
from megatron_ext.config.validate import validate
from megatron_ext.errors import UserError

Fields = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SweepFile:
    """A sweep as it is written.

    Attributes:
        config: what all runs share; a path beside the sweep's own file.
        fields: of the configuration, by dotted name, for all runs.
        axes: each is a choice that a run makes. Its values are labels with fields, or, where the axis is named for a
            field, a list of that field's values. There is a run for each combination.
        runs: further runs, by name, with their fields.
    """

    config: str
    fields: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)


def read_sweep(path: Path) -> tuple[Path, dict[str, list[str]]]:
    """Read a sweep.

    Returns:
        The configuration's file, and of each run, by name, what is laid over it, as `load_config` takes it.

    Raises:
        UserError: the file, or something in it, is not what it must be.
    """
    tree = validate(SweepFile, read_tree(path))
    axes = [_values(name, axis) for name, axis in tree.axes.items()]
    runs: dict[str, list[str]] = {}
    for choice in product(*axes) if axes else ():
        name = "-".join(label for label, _ in choice)
        _add(runs, name, [tree.fields, *(fields for _, fields in choice)])
    for name, fields in tree.runs.items():
        _add(runs, name, [tree.fields, fields])
    if not runs:
        raise UserError(str(path), "has no runs", "give axes, or runs")
    return path.parent / tree.config, runs


def _values(name: str, axis: Any) -> list[tuple[str, Fields]]:
    """Labels of an axis, with their fields."""
    where = f"axes.{name}"
    if isinstance(axis, list) and axis:
        if "." not in name:
            raise UserError(where, "is a list, and its name is no field", "call it for the field, e.g. training.seed")
        last = name.rsplit(".", 1)[1]
        return [(f"{last}{value}", {name: value}) for value in axis]
    if isinstance(axis, dict) and axis and all(isinstance(fields, dict) for fields in axis.values()):
        return [(str(label), fields) for label, fields in axis.items()]
    raise UserError(
        where, f"{json.dumps(axis)} is no axis", "give labels with their fields below, or a list of a field's values"
    )


def _add(runs: dict[str, list[str]], name: str, layers: list[Fields]) -> None:
    if name in runs:
        raise UserError(f"runs.{name}", "there are two of this name", "give each run labels of its own")
    runs[name] = [f"{key}={json.dumps(value)}" for fields in layers for key, value in fields.items()]
