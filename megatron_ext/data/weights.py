"""Validation of configured domain weights against the available domains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from data_prep.manifest import Manifest, match_domain
from megatron_ext.data.blend import shares
from megatron_ext.utils.errors import UserError

_FIELD = "data.weights"


def domain_weights(
    configured: Mapping[str, float], train_domains: Sequence[str], manifest: Manifest
) -> dict[str, float]:
    """Return the weight of each training domain, by the manifest's own name.

    Args:
        configured: weights by domain name, in SlimPajama's long form or the short form, in upper or lower case.
        train_domains: training domains of the run, by the manifest's names.
        manifest: manifest of the data.

    Raises:
        UserError: a name is not a training domain, two names mean the same domain, a domain has no weight, or the
            weights are invalid (see `blend.shares`).
    """
    weights: dict[str, float] = {}
    for name, weight in configured.items():
        domain = _find_domain(name, train_domains, manifest)
        if domain in weights:
            raise UserError(_FIELD, f"{name} has two weights under two names", "give each domain one weight")
        weights[domain] = weight
    missing = [domain for domain in train_domains if domain not in weights]
    if missing:
        hint = "give every training domain a weight (0: it is not read), or remove it from data.train_domains"
        raise UserError(_FIELD, f"has no weight for {', '.join(missing)}", hint)
    try:
        shares(list(weights.values()))
    except ValueError as error:
        raise UserError(_FIELD, str(error), "give each domain 0 or a larger weight, and not all 0") from None
    return weights


def _find_domain(name: str, train_domains: Sequence[str], manifest: Manifest) -> str:
    domain = match_domain(name, train_domains)
    if domain is not None:
        return domain
    present = manifest.domain_names("train")
    if match_domain(name, present) is None:
        raise UserError(_FIELD, f"no domain {name} in the train split", f"choose from: {', '.join(present)}")
    problem = f"{name} is not among data.train_domains ({', '.join(train_domains)})"
    raise UserError(_FIELD, problem, "add it there, or remove its weight")
