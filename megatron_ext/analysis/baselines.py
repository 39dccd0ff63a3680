"""Choice of the baseline that each architecture of a comparison is compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.analysis.architecture import Architecture, comparable_recipes, mixer_label, setting_text

_MIXER_FIELDS = ("model.pattern", "mixers.")
"""Prefixes of the fields in which an architecture and its baseline are meant to differ."""


@dataclass(frozen=True)
class BaselineGroup:
    """Baseline with the architectures that are compared with it.

    Attributes:
        baseline: the baseline.
        others: architectures that are compared with it.
        also_differs: settings besides the mixers in which an architecture differs from the baseline, by label.
    """

    baseline: Architecture
    others: tuple[Architecture, ...]
    also_differs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def baseline_groups(architectures: Sequence[Architecture]) -> list[BaselineGroup]:
    """Assign a baseline to each architecture.

    Baselines are the architectures with only attention layers of default settings, one for each size, learning rate and
    so on; without them, those with the first architecture's mixers. Another architecture is compared with the baseline
    that differs from it in the fewest settings besides the mixers; among equals, with the one that has the closest
    number of parameters. If all architectures have the same mixers, the first is the only baseline.

    Args:
        architectures: architectures from `group_runs`, the preferred baseline first.
    """
    if not architectures:
        return []
    kind = mixer_label(architectures[0].runs[0])
    candidates = [architecture for architecture in architectures if mixer_label(architecture.runs[0]) == kind]
    others = [architecture for architecture in architectures if architecture not in candidates]
    if not others:
        candidates, others = candidates[:1], candidates[1:]
    recipes = _recipes(architectures)
    members: dict[str, list[Architecture]] = {candidate.label: [] for candidate in candidates}
    differences: dict[str, dict[str, tuple[str, ...]]] = {candidate.label: {} for candidate in candidates}
    for other in others:
        fields = recipes[other.label]
        differing = [_differing(fields, recipes[candidate.label]) for candidate in candidates]
        distances = [
            (len(names), _size_distance(other, candidate))
            for names, candidate in zip(differing, candidates, strict=True)
        ]
        nearest = distances.index(min(distances))
        label = candidates[nearest].label
        members[label].append(other)
        if differing[nearest]:
            differences[label][other.label] = tuple(setting_text(name, fields.get(name)) for name in differing[nearest])
    return [
        BaselineGroup(candidate, tuple(members[candidate.label]), differences[candidate.label])
        for candidate in candidates
    ]


def _recipes(architectures: Sequence[Architecture]) -> dict[str, dict[str, Any]]:
    recipes = comparable_recipes([architecture.runs[0] for architecture in architectures])
    return {
        architecture.label: {name: value for name, value in fields.items() if not name.startswith(_MIXER_FIELDS)}
        for architecture, fields in zip(architectures, recipes, strict=True)
    }


def _differing(fields: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in fields.keys() | others.keys() if fields.get(name) != others.get(name))


def _size_distance(one: Architecture, other: Architecture) -> float:
    """Return the ratio of the numbers of parameters as a distance; 0 if one of them is not recorded."""
    sizes = [architecture.runs[0].size for architecture in (one, other)]
    if any(size is None for size in sizes):
        return 0.0
    first, second = (size.parameters for size in sizes if size is not None)
    return abs(math.log(first / second))
