"""Equivalent spellings of domains and weights in two configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from data_prep.manifest import match_domain
from megatron_ext.config.effects import Change
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.blend import shares
from megatron_ext.runs.identity import TRAIN_DOMAINS, WEIGHTS

DOMAIN_FIELDS = (TRAIN_DOMAINS, WEIGHTS)
"""Fields that checkpoints store twice: as configured, and resolved against the data."""


def remove_synonyms(found: Sequence[Change], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return changes without those of `DOMAIN_FIELDS` whose values are equivalent.

    Args:
        found: differences between two configurations.
        before: identity of the first configuration, see `runs.identity`.
        after: identity of the second configuration, or its `known_domains`.
    """
    equivalent = {
        field
        for field in DOMAIN_FIELDS
        if _resolve(field, before.get(field), before) == _resolve(field, after[field], after)
    }
    return [change for change in found if change.field not in equivalent]


def known_domains(config: RunConfig, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return `DOMAIN_FIELDS` resolved as in an identity, for a run whose data is not opened.

    Args:
        config: configuration of the run.
        before: identity of its checkpoint, which contains the data's own domain names.
    """
    names = before.get(TRAIN_DOMAINS) or []
    requested, weights = config.data.train_domains, config.data.weights
    if weights is not None:
        weights = {match_domain(name, names) or name: weight for name, weight in weights.items()}
        requested = [*weights] if requested is None else requested  # each training domain must have a weight
    if requested is not None:
        found = {match_domain(name, names) or name for name in requested}
        requested = [name for name in names if name in found] + sorted(found.difference(names))
    return {TRAIN_DOMAINS: requested, WEIGHTS: weights}


def _resolve(field: str, value: Any, identity: Mapping[str, Any]) -> Any:
    """Return the resolved meaning of a field's value: domain names, or weights normalized to shares."""
    if field == TRAIN_DOMAINS or value is None:
        return value
    names = identity.get(TRAIN_DOMAINS) or sorted(value)
    if set(names) != set(value):
        return value
    return dict(zip(names, shares([value[name] for name in names]), strict=True))
