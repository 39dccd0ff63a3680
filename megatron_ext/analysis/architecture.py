"""Which runs are seeds of one architecture, and what each architecture is called in a report."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_ext.analysis.runs import Run
from megatron_ext.config.effects import flat, makes_a_recipe
from megatron_ext.config.pattern import parse_pattern
from megatron_ext.errors import UserError

BASELINE = "attention"

BLOCK = {"block": "transformer", "normalization": "rms_norm"}
"""What stands around the mixers where a configuration, written before there was a choice, does not say."""

PLAIN: dict[str, dict[str, Any]] = {
    "attention": {
        "window": None,
        "temperature": 1.0,
        "random_keys": False,
        "random_keys_seed": 0,
        "position_encoding": "rope",
    },
    "top1_element": {"estimator": "straight_through", "position_encoding": "rope"},
    "top1_chunk": {"score": "exact", "chunk_size": 128, "top_k": 1, "local": True, "position_encoding": "rope"},
    "moba": {"block_size": 512, "top_k": 3, "position_encoding": "rope"},
    "nsa": {"block_size": 64, "num_selected": 16, "window": 512, "position_encoding": "rope"},
    "deltanet": {"conv_kernel_size": 4, "expand_v": 1, "output_gate": False},
    "gated_deltanet": {"conv_kernel_size": 4, "expand_v": 1, "output_gate": True},
    "linear_attention": {"feature_map": "elu", "expand_v": 1, "output_gate": False},
    "based": {"feature_dim": 16},
    "retnet": {"expand_v": 2, "output_gate": True},
    "mamba": {"state_size": 16, "expand": 2, "conv_kernel_size": 4, "dt_rank": None},
    "mamba2": {
        "state_size": 128,
        "expand": 2,
        "conv_kernel_size": 4,
        "convolution": True,
        "decay": "data_dependent",
        "group_norm": True,
    },
    "rwkv6": {"mix_rank": 32, "decay_rank": 64},
    "rwkv7": {"decay_rank": None, "rate_rank": None, "gate_rank": None},
    "gla": {"expand_v": 2, "output_gate": True, "decay_rank": 16, "decay_temperature": 16.0},
}
"""Mixers as the study defines them, by field: what a configuration leaves out, and what a label need not say. All
fields of all mixers stand here: one that a run of an earlier version lacks had this value."""

TEXT, CHANGED = "data.text", "run.changed"
"""Of a recipe what is no field: the training text, where runs differ in it, and what was changed on a run's way."""

_OUTSIDE = ("data.train_domains", "mixers.")
"""Beginnings of fields that are compared otherwise: domains by `read_runs` and as text, mixers with `PLAIN`."""

ALWAYS = ("score",)
"""Settings a label always shows: approximate and exact selection are different architectures to the study."""


@dataclass(frozen=True)
class Architecture:
    """Runs that differ in their seed alone, under one readable name."""

    label: str
    runs: tuple[Run, ...]


def group_runs(runs: Sequence[Run]) -> list[Architecture]:
    """Group runs by everything that makes their result but the seed; the baseline comes first.

    The baseline is `attention` as the study defines it, else the first architecture of attention layers alone, else
    the first run's. Runs of equal mixers that differ elsewhere (width, learning rate, ...) are told apart by label.

    Raises:
        UserError: two runs are of one architecture and one seed, which would count a measurement twice.
    """
    groups: dict[str, list[Run]] = {}
    recipes = recipes_of(runs)
    for run, fields in zip(runs, recipes, strict=True):
        members = groups.setdefault(json.dumps(fields, sort_keys=True, default=str), [])
        for other in members:
            if other.seed == run.seed:
                problem = f"has the same settings and seed ({run.seed}) as {other.path}"
                raise UserError(str(run.path), problem, "leave one of them out or change training.seed")
        members.append(run)
    members_of = list(groups.values())
    recipe_of = {id(run): fields for run, fields in zip(runs, recipes, strict=True)}
    firsts = [members[0] for members in members_of]
    labels = _labels(firsts, [recipe_of[id(run)] for run in firsts])
    architectures = [Architecture(label, tuple(members)) for label, members in zip(labels, members_of, strict=True)]
    return sorted(architectures, key=_baseline_rank)  # stable: the order given holds among the rest


def mixer_label(run: Run) -> str:
    """What a run's layers are, whatever their number and width: the repeated part of its pattern, and settings."""
    layers = parse_pattern(run.pattern)
    period = next(n for n in range(1, len(layers) + 1) if layers[:n] * (len(layers) // n) == layers)
    runs_of_one = [(name, len(list(some))) for name, some in groupby(layers[:period])]
    name = ",".join(name if count == 1 else f"{name}*{count}" for name, count in runs_of_one)
    return _label(name, _settings(recipe(run)))


def recipe(run: Run) -> dict[str, Any]:
    """Dotted field -> value of all that decides a run's result but the seed and the text.

    All fields count but those that are known not to change the result, see `effects.makes_a_recipe`; one that the run's
    version did not have yet counts as its default.
    """
    given = run.config.get("mixers") or {}
    mixers = {name: PLAIN.get(name, {}) | (given.get(name) or {}) for name in mixer_names(run.pattern)}
    fields = {
        field: value
        for field, value in flat(run.config).items()
        if makes_a_recipe(field) and not field.startswith(_OUTSIDE)
    }
    fields |= {f"mixers.{name}.{field}": value for name, some in mixers.items() for field, value in some.items()}
    fields["data.weights"] = _parts(fields["data.weights"])
    changed = [] if run.size is None else run.size.changed
    if changed:
        fields[CHANGED] = "; ".join(f"{one['field']} at step {one['step']}" for one in changed)
    return fields


def recipes_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The recipe of each run, with its training text where runs differ in it.

    Of runs of an earlier version nobody knows the text: where all others have one, it is taken to be theirs.
    """
    texts = [None if run.size is None or run.size.data is None else run.size.data.train[:TEXT_DIGITS] for run in runs]
    differ = len({one for one in texts if one is not None}) > 1
    return [recipe(run) | ({TEXT: text} if differ else {}) for run, text in zip(runs, texts, strict=True)]


TEXT_DIGITS = 8
"""Of a text's digest, in a label."""


def _parts(weights: Mapping[str, float] | None) -> dict[str, float] | None:
    """Weights in one unit and one order."""
    if not weights or not sum(weights.values()):
        return None
    whole = sum(weights.values())
    return {name: round(weights[name] / whole, 9) for name in sorted(weights)}


def mixer_names(pattern: str) -> list[str]:
    """Mixers a layer pattern names, each once, in their order."""
    return list(dict.fromkeys(re.findall(r"[A-Za-z_]\w*", pattern)))


def _baseline_rank(architecture: Architecture) -> int:
    if architecture.label == BASELINE:
        return 0
    return 1 if mixer_names(architecture.runs[0].pattern) == [BASELINE] else 2


def _labels(runs: Sequence[Run], recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """A label for each, telling apart those whose mixers would give them the same one."""
    names = [(_base_name(run.pattern), _settings(fields)) for run, fields in zip(runs, recipes, strict=True)]
    labels = []
    for name, fields in zip(names, recipes, strict=True):
        twins = [other for other_name, other in zip(names, recipes, strict=True) if other_name == name]
        labels.append(_label(name[0], [*name[1], *differing_settings(fields, twins)]))
    return labels


def differing_settings(fields: Mapping[str, Any], twins: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings that tell a recipe from others: those in which any of them differs from it."""
    keys = sorted({key for twin in twins for key in twin})
    differing = _telling([key for key in keys if any(twin.get(key) != fields.get(key) for twin in twins)], twins)
    return [_setting(key, fields.get(key)) for key in differing]


def _telling(keys: Sequence[str], twins: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys without those that tell twins apart just as another does: a wider model has wider heads, too."""
    told: dict[tuple[int, ...], str] = {}
    for key in sorted(keys, key=lambda key: key != "model.hidden_size"):  # the cause before what follows from it
        values = [twin.get(key) for twin in twins]
        told.setdefault(tuple(values.index(value) for value in values), key)
    return [key for key in keys if key in told.values()]


def _label(name: str, settings: Sequence[str]) -> str:
    return f"{name} ({', '.join(settings)})" if settings else name


def _base_name(pattern: str) -> str:
    names = mixer_names(pattern)
    return names[0] if len(names) == 1 else pattern


def _settings(fields: Mapping[str, Any]) -> list[str]:
    """What of the block and the mixers' settings belongs in the name."""
    always: list[str] = []
    departures = [_setting(name, fields[f"model.{name}"]) for name in BLOCK if fields[f"model.{name}"] != BLOCK[name]]
    for key, value in fields.items():
        section, _, rest = key.partition(".")
        mixer, _, field = rest.partition(".")
        if section != "mixers":
            continue
        plain = PLAIN.get(mixer, {})
        if field in ALWAYS:
            always.append(str(value))
        elif field in plain and value != plain[field]:
            departures.append(_setting(key, value))
    return always + departures


def _setting(key: str, value: Any) -> str:
    field = key.rpartition(".")[2]
    if isinstance(value, bool):
        return field if value else f"no {field}"
    if isinstance(value, Mapping):
        value = ":".join(f"{part:.3g}" for part in value.values())
    return f"{field} {'none' if value is None else value}"
