"""Configuration fields recorded with a checkpoint, converted for comparison with the fields of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megatron_ext.config.effects import Change, Effect, flat, is_field, with_defaults
from megatron_ext.config.load import read_tree
from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.config.validate import validate
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.optim.schedule import first_different_rate
from megatron_ext.runs.config_files import config_path_at
from megatron_ext.runs.identity import FIELDS, TOKENIZER
from megatron_ext.training.domain_synonyms import DOMAIN_FIELDS


def recorded_fields(identity: Mapping[str, Any], checkpoint: Path, step: int) -> tuple[dict[str, Any], bool]:
    """Return the configuration fields of a checkpoint, and whether they are complete.

    A checkpoint of an earlier version stores only some fields. The others are read from the run folder.
    """
    if FIELDS in identity:
        return with_defaults(identity[FIELDS]), True
    known = {field: value for field, value in identity.items() if is_field(field)}
    for field in ("data.reset_positions", "data.reset_attention"):
        if field in known:
            known[field] = bool(known[field])
    for field in (*DOMAIN_FIELDS, TOKENIZER):  # these hold resolved values; the file has the configured ones
        known.pop(field, None)
    path = config_path_at(checkpoint.parents[1], step)
    if path is None:
        return known, False
    return {**flat(read_tree(path)), **known}, True


def mixer_defaults(used: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of all fields of the configured mixers, by dotted name."""
    known = load_all()
    found: dict[str, Any] = {}
    for name in {field.split(".")[1] for field in used if field.startswith("mixers.")}:
        kind = known[name].config_type
        values = TypeAdapter(kind).dump_python(validate(kind, {}), mode="json")
        found |= {f"mixers.{name}.{field}": value for field, value in values.items()}
    return found


def describe_other_rate(
    found: Sequence[Change], before: Mapping[str, Any], after: Mapping[str, Any], step: int
) -> str | None:
    """Describe the first completed step whose learning rate would differ with the new schedule, or return None."""
    if not any(change.effect is Effect.SCHEDULE for change in found):
        return None
    other = first_different_rate(*_schedule(before), *_schedule(after), step)
    if other is None:
        return None
    number, rate, now = other
    return f"the learning rate of step {number} was {rate:.6g}, and would have been {now:.6g}"


def _schedule(config: Mapping[str, Any]) -> tuple[OptimizerConfig, int]:
    names = [field.name for field in fields(OptimizerConfig)]
    given = {name: config[f"optimizer.{name}"] for name in names}
    return validate(OptimizerConfig, given, "optimizer."), int(config["training.steps"])
