"""Domains and weights that two configurations write in two ways and that mean the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from data_prep.manifest import match_domain
from megatron_ext.config.effects import Change
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.blend import shares

TRAIN_DOMAINS, WEIGHTS = "data.train_domains", "data.weights"
DOMAIN_FIELDS = (TRAIN_DOMAINS, WEIGHTS)
"""Fields of which checkpoints keep what they mean for the data, beside how they were written."""


def without_synonyms(found: Sequence[Change], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Changes without those of `DOMAIN_FIELDS` that mean the same.

    Args:
        found: differences between two configurations.
        before: identity of the first, see `training.identity`.
        after: identity of the second, or its `known_domains`.
    """
    same = {
        field
        for field in DOMAIN_FIELDS
        if _meaning(field, before.get(field), before) == _meaning(field, after[field], after)
    }
    return [one for one in found if one.field not in same]


def known_domains(config: RunConfig, before: Mapping[str, Any]) -> dict[str, Any]:
    """`DOMAIN_FIELDS` as an identity has them, for a run whose data is not opened.

    Args:
        config: of the run.
        before: identity of its checkpoint, which has the data's own names of the domains.
    """
    names = before.get(TRAIN_DOMAINS) or []
    asked, weights = config.data.train_domains, config.data.weights
    if weights is not None:
        weights = {match_domain(name, names) or name: weight for name, weight in weights.items()}
        asked = [*weights] if asked is None else asked  # each domain that is trained on must have one
    if asked is not None:
        found = {match_domain(name, names) or name for name in asked}
        asked = [name for name in names if name in found] + sorted(found.difference(names))
    return {TRAIN_DOMAINS: asked, WEIGHTS: weights}


def _meaning(field: str, value: Any, identity: Mapping[str, Any]) -> Any:
    """What a field's value, as an identity has it, makes of the data."""
    if field == TRAIN_DOMAINS or value is None:
        return value
    names = identity.get(TRAIN_DOMAINS) or sorted(value)
    if set(names) != set(value):
        return value
    return dict(zip(names, shares([value[name] for name in names]), strict=True))
