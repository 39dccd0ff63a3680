"""Grouping of runs into architectures, and the labels of architectures in a report."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_ext.analysis.runs import Run
from megatron_ext.config.effects import distinguishes_recipes, flat
from megatron_ext.config.pattern import parse_pattern
from megatron_ext.mixers.core.settings import always_labelled, default_settings
from megatron_ext.utils.errors import UserError

BASELINE = "attention"

BLOCK = {"block": "transformer", "normalization": "rms_norm"}
"""Block and normalization of configurations that lack these fields because an earlier version wrote them."""

TEXT, CHANGED = "data.text", "run.changed"
"""Entries of a recipe that are not configuration fields: the training text, if runs differ in it, and configuration
changes during a run."""

_COMPARED_SEPARATELY = ("data.train_domains", "mixers.")
"""Prefixes of fields with a comparison of their own. Domains are compared in `read_runs` and as text. Missing settings
of mixers are set to their defaults before they are compared."""


@dataclass(frozen=True)
class Architecture:
    """Runs that differ only in their seed, with a readable label."""

    label: str
    runs: tuple[Run, ...]


def group_runs(runs: Sequence[Run]) -> list[Architecture]:
    """Group runs by all settings that affect the result except the seed; the baseline comes first.

    The baseline is `attention` with default settings. Without it, the baseline is the first architecture with only
    attention layers, or else the architecture of the first run. Labels distinguish runs with equal mixers but other
    differences (width, learning rate, ...).

    Raises:
        UserError: two runs have the same architecture and seed, which would count a measurement twice.
    """
    groups: dict[str, list[Run]] = {}
    recipes = comparable_recipes(runs)
    for run, fields in zip(runs, recipes, strict=True):
        members = groups.setdefault(json.dumps(fields, sort_keys=True, default=str), [])
        for other in members:
            if other.seed == run.seed:
                problem = f"has the same settings and seed ({run.seed}) as {other.path}"
                raise UserError(str(run.path), problem, "remove one of them or change training.seed")
        members.append(run)
    members_of = list(groups.values())
    recipe_of = {id(run): fields for run, fields in zip(runs, recipes, strict=True)}
    representatives = [members[0] for members in members_of]
    labels = _labels(representatives, [recipe_of[id(run)] for run in representatives])
    architectures = [Architecture(label, tuple(members)) for label, members in zip(labels, members_of, strict=True)]
    return sorted(architectures, key=_baseline_priority)  # stable: the others keep their order


def mixer_label(run: Run) -> str:
    """Return a label of a run's mixers that does not depend on depth and width.

    The label is the repeated part of the layer pattern, with the settings that differ from the defaults.
    """
    layers = parse_pattern(run.pattern)
    period = next(n for n in range(1, len(layers) + 1) if layers[:n] * (len(layers) // n) == layers)
    repetitions = [(name, len(list(group))) for name, group in groupby(layers[:period])]
    name = ",".join(name if count == 1 else f"{name}*{count}" for name, count in repetitions)
    return _label(name, _settings(recipe(run)))


def recipe(run: Run) -> dict[str, Any]:
    """Return all settings that affect a run's result except the seed and the text, as values by dotted field.

    Only fields that are known not to affect the result are excluded, see `effects.distinguishes_recipes`. A field that
    the run's version did not have gets its default value.
    """
    mixer_settings = run.config.get("mixers") or {}
    mixers = {name: default_settings(name) | (mixer_settings.get(name) or {}) for name in mixer_names(run.pattern)}
    fields = {
        field: value
        for field, value in flat(run.config).items()
        if distinguishes_recipes(field) and not field.startswith(_COMPARED_SEPARATELY)
    }
    fields |= {
        f"mixers.{name}.{field}": value for name, settings in mixers.items() for field, value in settings.items()
    }
    fields["data.weights"] = _normalized_weights(fields["data.weights"])
    changed = [] if run.size is None else run.size.changed
    if changed:
        fields[CHANGED] = "; ".join(f"{change['field']} at step {change['step']}" for change in changed)
    return fields


def comparable_recipes(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the recipe of each run, with the digest of its training text if runs differ in it.

    The text of runs of an earlier version is unknown. If all other runs have the same text, it is assumed for them too.
    """
    texts = [None if run.size is None or run.size.data is None else run.size.data.train[:TEXT_DIGITS] for run in runs]
    differ = len({text for text in texts if text is not None}) > 1
    return [recipe(run) | ({TEXT: text} if differ else {}) for run, text in zip(runs, texts, strict=True)]


TEXT_DIGITS = 8
"""Number of digits of a text's digest in a label."""


def _normalized_weights(weights: Mapping[str, float] | None) -> dict[str, float] | None:
    """Normalize weights to a sum of 1, sorted by name."""
    if not weights or not sum(weights.values()):
        return None
    total = sum(weights.values())
    return {name: round(weights[name] / total, 9) for name in sorted(weights)}


def mixer_names(pattern: str) -> list[str]:
    """Return the distinct mixers of a layer pattern, in their order."""
    return list(dict.fromkeys(re.findall(r"[A-Za-z_]\w*", pattern)))


def _baseline_priority(architecture: Architecture) -> int:
    if mixer_label(architecture.runs[0]) == BASELINE:
        return 0
    return 1 if mixer_names(architecture.runs[0].pattern) == [BASELINE] else 2


def _labels(runs: Sequence[Run], recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a label for each run. Runs with the same mixers get their differing settings added."""
    names = [(_mixers_name(run.pattern), _settings(fields)) for run, fields in zip(runs, recipes, strict=True)]
    labels = []
    for name, fields in zip(names, recipes, strict=True):
        peers = [other for other_name, other in zip(names, recipes, strict=True) if other_name == name]
        labels.append(_label(name[0], [*name[1], *differing_settings(fields, peers)]))
    return labels


def differing_settings(fields: Mapping[str, Any], peers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings of a recipe in which any of the others differs from it."""
    keys = sorted({key for peer in peers for key in peer})
    differing = _without_redundant(
        [key for key in keys if any(peer.get(key) != fields.get(key) for peer in peers)], peers
    )
    return [setting_text(key, fields.get(key)) for key in differing]


def _without_redundant(keys: Sequence[str], peers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Remove keys that distinguish the peers in the same way as another key, such as head_dim beside hidden_size."""
    by_partition: dict[tuple[int, ...], str] = {}
    for key in sorted(keys, key=lambda key: key != "model.hidden_size"):  # prefer the cause to its consequences
        values = [peer.get(key) for peer in peers]
        by_partition.setdefault(tuple(values.index(value) for value in values), key)
    return [key for key in keys if key in by_partition.values()]


def _label(name: str, settings: Sequence[str]) -> str:
    return f"{name} ({', '.join(settings)})" if settings else name


def _mixers_name(pattern: str) -> str:
    names = mixer_names(pattern)
    return names[0] if len(names) == 1 else pattern


def _settings(fields: Mapping[str, Any]) -> list[str]:
    """Return the settings of the block and the mixers that a label shows."""
    always_shown: list[str] = []
    changed_settings = [
        setting_text(name, fields[f"model.{name}"]) for name in BLOCK if fields[f"model.{name}"] != BLOCK[name]
    ]
    for key, value in fields.items():
        section, _, setting = key.partition(".")
        mixer, _, field = setting.partition(".")
        if section != "mixers":
            continue
        defaults = default_settings(mixer)
        if field in always_labelled(mixer):
            always_shown.append(str(value))
        elif field in defaults and value != defaults[field]:
            changed_settings.append(setting_text(key, value))
    return always_shown + changed_settings


def setting_text(key: str, value: Any) -> str:
    """Format a setting of a recipe for a label, such as `hidden_size 512` or `no rope`."""
    field = "optimizer" if key == "optimizer.name" else key.rpartition(".")[2]
    if isinstance(value, bool):
        return field if value else f"no {field}"
    if isinstance(value, Mapping):
        value = ":".join(f"{part:.3g}" for part in value.values())
    return f"{field} {'none' if value is None else value}"
