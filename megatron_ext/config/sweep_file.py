"""Sweep files: a base configuration, and runs that differ from it in some fields."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from megatron_ext.config.load import read_tree
from megatron_ext.config.schema import STRICT
from megatron_ext.config.validate import show, validate
from megatron_ext.run_folder.launch_events import LAUNCH
from megatron_ext.utils.errors import UserError

Fields = Mapping[str, Any]

PLAN = "plan."
"""Prefix of field names from which other fields are derived; see `planning.fields`."""

WIDTH = "model.ffn_hidden_size"
"""Field that is adjusted to match parameter counts."""

CHOOSABLE = "optimizer."
"""Prefix of the fields that may be chosen by a loss. Others change the model, the data or the length of a run."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MatchParameters:
    """Match of parameter counts between runs, by the feed-forward width.

    Attributes:
        axis: axis along which runs are matched. Matched runs differ in nothing else.
        to: label of the reference run on that axis.
        multiple_of: the width is a multiple of this and of the tensor-parallel size.
        within: tolerance, as a fraction of the reference's parameters.
    """

    axis: str
    to: str
    multiple_of: PositiveInt = 8
    within: PositiveFloat = 0.01


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ChoiceAxis:
    """Axis whose values are all trained, to compare the other axes at the best value of each.

    Attributes:
        choose: rule of the choice. best_by validation: the lowest loss on held-out text of the training domains after
            the last step.
        values: labels with fields or a list of values, as for any other axis; fields of the section optimizer only.
    """

    choose: Literal["best_by validation"]
    values: Any


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SweepFile:
    """Content of a sweep file.

    Attributes:
        config: base configuration of all runs; a path relative to the sweep file.
        fields: overrides for all runs, by dotted name.
        axes: choices, by name. The values of an axis are labels with fields or, if the axis is named for a field, a
            list of the field's values. There is one run for each combination of the axes. An axis may also be a
            `ChoiceAxis`.
        runs: further runs by name, with their fields.
        match_parameters: see `MatchParameters`. It does not apply to the further runs.
    """

    config: str
    fields: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    match_parameters: MatchParameters | None = None


@dataclasses.dataclass(frozen=True)
class SweptRuns:
    """Runs of a sweep.

    Attributes:
        config: file of the base configuration.
        runs: overrides of each run by name, as for `load_config`, including `plan.` fields.
        match: how parameters are matched; None: not at all.
        reference_runs: by name of a matched run, its reference run.
        chosen: fields of which the best value is chosen for each combination of the other axes; see `ChoiceAxis`.
    """

    config: Path
    runs: dict[str, list[str]]
    match: MatchParameters | None = None
    reference_runs: Mapping[str, str] = field(default_factory=dict)
    chosen: Sequence[str] = ()


@contextmanager
def sweep_errors(path: Path, run: str = "") -> Iterator[None]:
    """Context manager that prefixes errors with the sweep file and the run."""
    try:
        yield
    except UserError as error:
        where = f"run {run}: {error.where}" if run else error.where
        raise UserError(f"{path}: {where}", error.problem, error.hint) from error


def read_sweep(path: Path) -> SweptRuns:
    """Read and check a sweep file.

    Raises:
        UserError: the file or something in it is invalid.
    """
    content = read_tree(path, "sweep", "`config:`, the file that all runs share")
    with sweep_errors(path):
        return _swept(path, validate(SweepFile, content))


def _swept(path: Path, tree: SweepFile) -> SweptRuns:
    choices = {name: validate(ChoiceAxis, axis, f"axes.{name}.") for name, axis in tree.axes.items() if _chooses(axis)}
    axes = {name: _values(name, choices[name].values if name in choices else axis) for name, axis in tree.axes.items()}
    chosen = _chosen_fields({name: axes[name] for name in choices})
    if tree.match_parameters is not None:
        _check_match(tree.match_parameters, axes)
    runs: dict[str, list[str]] = {}
    reference_runs: dict[str, str] = {}
    for choice in product(*axes.values()) if axes else ():
        labels = dict(zip(axes, (label for label, _ in choice), strict=True))
        name = "-".join(labels.values())
        _add(runs, "axes", name, [tree.fields, *(fields for _, fields in choice)])
        if (match := tree.match_parameters) is not None and labels[match.axis] != match.to:
            reference_runs[name] = "-".join((labels | {match.axis: match.to}).values())
    for name, fields in tree.runs.items():
        _add(runs, f"runs.{name}", name, [tree.fields, fields])
    if not runs:
        raise UserError("axes, runs", "there are none", "give one of the two")
    return SweptRuns(path.parent / tree.config, runs, tree.match_parameters, reference_runs, chosen)


def _chooses(axis: Any) -> bool:
    """Return True if an axis is a `ChoiceAxis`; the value of a label named `choose` is a mapping of fields instead."""
    return isinstance(axis, dict) and not isinstance(axis.get("choose", {}), dict)


def _chosen_fields(axes: Mapping[str, Sequence[tuple[str, Fields]]]) -> tuple[str, ...]:
    """Return the fields of the axes whose best value is chosen, each once."""
    for axis, values in axes.items():
        for name in (name for _, fields in values for name in fields if not name.startswith(CHOOSABLE)):
            hint = f"choose among values of {CHOOSABLE}lr or another field of that section, or remove `choose`"
            raise UserError(f"axes.{axis}", f"{name} cannot be chosen by a loss", hint)
    return tuple(dict.fromkeys(name for values in axes.values() for _, fields in values for name in fields))


def _check_match(match: MatchParameters, axes: Mapping[str, Sequence[tuple[str, Fields]]]) -> None:
    if match.axis not in axes:
        hint = f"choose from: {', '.join(axes)}" if axes else "give axes, or remove match_parameters"
        raise UserError("match_parameters.axis", f"there is no axis {match.axis}", hint)
    labels = [label for label, _ in axes[match.axis]]
    if match.to not in labels:
        problem = f"axis {match.axis} has no label {match.to}"
        raise UserError("match_parameters.to", problem, f"choose from: {', '.join(labels)}")
    for label, fields in axes[match.axis]:
        if label != match.to and WIDTH in fields:
            problem = f"{show(fields[WIDTH])}, but match_parameters determines this width"
            raise UserError(
                f"axes.{match.axis}.{label}.{WIDTH}", problem, "remove it there, or remove match_parameters"
            )


def _values(name: str, axis: Any) -> list[tuple[str, Fields]]:
    """Return the labels of an axis with their fields."""
    where = f"axes.{name}"
    if isinstance(axis, list) and axis:
        if "." not in name:
            problem = f"{show(axis)} is a list of values, but {name} is not a field"
            raise UserError(where, problem, "name the axis after the field, e.g. training.seed")
        last = name.rsplit(".", 1)[1]
        return [(f"{last}{_label(name, value)}", {name: value}) for value in axis]
    if isinstance(axis, dict) and axis and all(isinstance(fields, dict) for fields in axis.values()):
        return [(str(label), fields) for label, fields in axis.items()]
    hint = "give labels with their fields below, or a list of a field's values"
    raise UserError(where, f"{show(axis)} is not an axis", hint)


def _label(name: str, value: Any) -> str:
    """Format a value for a run's name. Budgets are written like 3e17, as names contain no `+`."""
    return f"{value:g}".replace("+", "") if name.startswith(PLAN) and isinstance(value, float) else f"{value}"


def _add(runs: dict[str, list[str]], where: str, name: str, layers: list[Fields]) -> None:
    if name == LAUNCH:
        raise UserError(
            where, f"a run named {name}, which is reserved for the folder of the sweep's jobs", "choose another name"
        )
    if name in runs:
        raise UserError(where, f"there are two runs named {name}", "give each run distinct labels")
    runs[name] = [f"{key}={json.dumps(value)}" for fields in layers for key, value in fields.items()]
