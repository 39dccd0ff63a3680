"""Identity of a run in each of its checkpoints: model, configuration, data and allowed changes.

Training and conversion build the entries of the model with `model_identity`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from megatron_ext.checkpoint.folder import DamagedCheckpoint
from megatron_ext.config.effects import flat
from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import ModelConfig, RunConfig

if TYPE_CHECKING:  # conversion reads no data
    from megatron_ext.data.datasets import RunData

FIELDS, DATA, CHANGED = "config", "data", "changed"
"""Entries of an identity: all configuration fields by dotted name; the record of the data, see
`data.identity.data_record`; allowed changes that affect earlier steps, see `training.continuing`.
"""

SEQ_LENGTH, VOCAB_SIZE, PRECISION = "data.seq_length", "data.vocab_size", "training.precision"
"""Entries of the model besides its sections `model.` and `mixers.NAME.`."""

TRAIN_DOMAINS, WEIGHTS, TOKENIZER = "data.train_domains", "data.weights", "data.tokenizer"
"""Entries of the data: names of the training domains and their weights, resolved against the data; the tokenizer's
sha256.
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
    TRAIN_DOMAINS: TypeAdapter(list[str] | None),
    WEIGHTS: TypeAdapter(dict[str, float] | None),
    TOKENIZER: TypeAdapter(str | None),
}
"""Entries that a run is compared with, and their types. A checkpoint of an earlier version may lack some."""


def check_identity(identity: Mapping[str, Any], file: Path) -> None:
    """Reject an identity whose entries have the wrong type.

    Args:
        identity: identity from the record of a checkpoint.
        file: file that contains the record.

    Raises:
        DamagedCheckpoint: an entry has the wrong type.
    """
    for name, kind in _ENTRIES.items():
        try:
            if name in identity:
                kind.validate_json(json.dumps(identity[name]))
        except ValidationError:
            problem = f"entry {name} of its identity has the wrong type"
            raise DamagedCheckpoint(str(file), problem, "restore it from a copy, or use another checkpoint") from None


def identity(config: RunConfig, data: RunData) -> dict[str, Any]:
    """Return the identity of a run as plain values.

    The model's fields are also top-level entries, for programs that read a checkpoint without a configuration. The
    top-level domains and weights are resolved against the data.
    """
    used = {name: config.mixers.get(name, {}) for name in parse_pattern(config.model.pattern)}
    return {
        **model_identity(config.model, used, config.data.seq_length, data.vocab_size, config.training.precision),
        TRAIN_DOMAINS: data.train_domains,
        # The following are None if unset: equal to the identity of a checkpoint from before these fields existed.
        WEIGHTS: data.weights,
        "data.reset_positions": config.data.reset_positions or None,
        "data.reset_attention": config.data.reset_attention or None,
        TOKENIZER: data.manifest.tokenizer.sha256,
        "training.seed": config.training.seed,
        FIELDS: flat(config),
        DATA: dict(data.record),
        CHANGED: [],
    }


def model_identity(
    model: ModelConfig, mixers: Mapping[str, Mapping[str, Any]], seq_length: int, vocab_size: int, precision: str
) -> dict[str, Any]:
    """Return the part of an identity that describes the model. A converted model has only this part.

    Args:
        model: model section of the configuration.
        mixers: complete configuration of each used mixer as plain values, by name.
        seq_length: number of tokens per sample.
        vocab_size: number of tokens in the vocabulary, without padding.
        precision: `training.precision` of the run.
    """
    sections = {"model": asdict(model), **{f"mixers.{name}": mixers[name] for name in sorted(mixers)}}
    return {
        **{f"{name}.{field}": value for name, fields in sections.items() for field, value in fields.items()},
        SEQ_LENGTH: seq_length,
        VOCAB_SIZE: vocab_size,
        PRECISION: precision,
    }


def identity_section(identity: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of a section of an identity, e.g. `model` or `mixers.attention`."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in identity.items() if key.startswith(prefix)}
