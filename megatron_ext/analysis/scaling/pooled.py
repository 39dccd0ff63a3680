"""Grouping of runs into laws. Runs of one law differ only in size, length, seed and the settings tuned to these."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from megatron_ext.analysis.architecture import comparable_recipes, differing_settings, mixer_label
from megatron_ext.analysis.runs import Run

SIZE_FIELDS = (
    *("model.pattern", "model.hidden_size", "model.num_attention_heads", "model.num_query_groups", "model.head_dim"),
    *("model.ffn_hidden_size", "training.steps", "training.global_batch_size"),
    *("optimizer.lr", "optimizer.min_lr", "optimizer.warmup_steps", "optimizer.decay_steps"),
)
"""Fields in which the runs of one law may differ: those that set size and tokens, and those tuned for them."""

LAW_SEPARATOR = ": "
"""Separator between the mixer and the settings that distinguish several laws of one mixer."""


def law_names(runs: Sequence[Run], chosen: Collection[str] = ()) -> list[str]:
    """Return the name of each run's law: its mixer label, and the settings that differ between runs of that mixer.

    Runs of a mixer with different sequence lengths, optimizers, data mixtures or texts belong to different laws.

    Args:
        runs: all runs of a fit.
        chosen: further fields in which the runs of one law may differ.
    """
    labels = [mixer_label(run) for run in runs]
    recipes = [
        {field: value for field, value in recipe.items() if field not in SIZE_FIELDS and field not in chosen}
        for recipe in comparable_recipes(runs)
    ]
    names = []
    for label, fields in zip(labels, recipes, strict=True):
        peers = _distinct([recipe for other, recipe in zip(labels, recipes, strict=True) if other == label])
        settings = differing_settings(fields, peers) if len(peers) > 1 else []
        names.append(f"{label}{LAW_SEPARATOR}{', '.join(settings)}" if settings else label)
    return names


def _distinct(recipes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({json.dumps(recipe, sort_keys=True, default=str): recipe for recipe in recipes}.values())
