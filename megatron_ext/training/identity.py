"""What every checkpoint of a run says of the run: its configuration, its data, and what was changed on the way."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatron_ext.config.effects import flat
from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import RunConfig
from megatron_ext.training.datasets import RunData

FIELDS, DATA, CHANGED = "config", "data", "changed"
"""Entries of an identity: all fields of the configuration by dotted name; the record of the data, see
`data.identity.data_record`; changes of the steps before that were allowed by name, see `training.continuing`."""


def identity(config: RunConfig, data: RunData) -> dict[str, Any]:
    """What a run is, as plain values.

    The model's fields stand at the top, too, for programs that read a checkpoint without a configuration; domains and
    weights there are what they mean for the data.
    """
    used = {name: config.mixers.get(name, {}) for name in sorted(set(parse_pattern(config.model.pattern)))}
    return {
        **{f"model.{field}": value for field, value in asdict(config.model).items()},
        **{f"mixers.{name}.{field}": value for name, fields in used.items() for field, value in fields.items()},
        "data.seq_length": config.data.seq_length,
        "data.train_domains": data.train_domains,
        # What a checkpoint from before there were such fields says of them: nothing.
        "data.weights": data.weights,
        "data.reset_positions": config.data.reset_positions or None,
        "data.reset_attention": config.data.reset_attention or None,
        "data.tokenizer": data.manifest.tokenizer.sha256,
        "data.vocab_size": data.vocab_size,
        "training.seed": config.training.seed,
        "training.precision": config.training.precision,
        FIELDS: flat(config),
        DATA: dict(data.record),
        CHANGED: [],
    }
