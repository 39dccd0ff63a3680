"""Identity of a run in each of its checkpoints: configuration, data and allowed changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from megatron_ext.checkpoint.folder import DamagedCheckpoint
from megatron_ext.config.effects import flat
from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.datasets import RunData

FIELDS, DATA, CHANGED = "config", "data", "changed"
"""Entries of an identity: all configuration fields by dotted name; the record of the data, see
`data.identity.data_record`; allowed changes that affect earlier steps, see `training.continuing`.
"""

_ENTRY = ConfigDict(extra="ignore", strict=True)


@checked_dataclass(frozen=True, config=_ENTRY)
class _Text:
    split: str
    domain: str
    documents: int
    tokens: int
    sha256: str


@checked_dataclass(frozen=True, config=_ENTRY)
class _Data:
    train: str
    evaluation: str
    texts: list[_Text]


@checked_dataclass(frozen=True, config=_ENTRY)
class _Changed:
    step: int
    field: str
    before: Any
    after: Any


_ENTRIES: dict[str, TypeAdapter[Any]] = {
    FIELDS: TypeAdapter(dict[str, Any]),
    DATA: TypeAdapter(_Data),
    CHANGED: TypeAdapter(list[_Changed]),
    "data.train_domains": TypeAdapter(list[str] | None),
    "data.weights": TypeAdapter(dict[str, float] | None),
    "data.tokenizer": TypeAdapter(str | None),
}
"""Entries that a run is compared with, and their types. A checkpoint of an earlier version may lack some."""


def check_identity(identity: Mapping[str, Any], file: Path) -> None:
    """Reject an identity whose entries have the wrong type.

    Args:
        identity: from a checkpoint's record.
        file: that contains the record.

    Raises:
        DamagedCheckpoint: an entry has the wrong type.
    """
    for name, kind in _ENTRIES.items():
        try:
            if name in identity:
                kind.validate_json(json.dumps(identity[name]))
        except ValidationError:
            problem = f"{name} of its identity is not what training writes there"
            raise DamagedCheckpoint(
                str(file), problem, "bring it back from a copy, or name another checkpoint"
            ) from None


def identity(config: RunConfig, data: RunData) -> dict[str, Any]:
    """Return the identity of a run as plain values.

    The model's fields are also top-level entries, for programs that read a checkpoint without a configuration. The
    top-level domains and weights are resolved against the data.
    """
    used = {name: config.mixers.get(name, {}) for name in sorted(set(parse_pattern(config.model.pattern)))}
    return {
        **{f"model.{field}": value for field, value in asdict(config.model).items()},
        **{f"mixers.{name}.{field}": value for name, fields in used.items() for field, value in fields.items()},
        "data.seq_length": config.data.seq_length,
        "data.train_domains": data.train_domains,
        # The following are None if unset: equal to the identity of a checkpoint from before these fields existed.
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
