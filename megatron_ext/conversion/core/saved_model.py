"""Conversion between the identity in a checkpoint's record and the model that it describes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from megatron_ext.config.load import load_config
from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import ModelConfig, ParallelConfig
from megatron_ext.config.validate import validate
from megatron_ext.conversion.core.family import SavedModel
from megatron_ext.conversion.core.mixer_settings import find_settings_class
from megatron_ext.runs.identity import SEQ_LENGTH, VOCAB_SIZE, identity_section, model_identity
from megatron_ext.utils.errors import UserError

if TYPE_CHECKING:
    from megatron_ext.model.shape import ModelShape


def saved_model(identity: Mapping[str, Any], where: str) -> SavedModel:
    """Return the model that a record's identity describes.

    Args:
        identity: values by dotted field name, see `runs.identity.identity`.
        where: file of the record, for error messages.

    Raises:
        UserError: a field is missing, as in records of earlier versions, or is invalid.
    """
    needed = [*(f"model.{field.name}" for field in dataclasses.fields(ModelConfig)), VOCAB_SIZE, SEQ_LENGTH]
    missing = [field for field in needed if field not in identity]
    if missing:
        hint = "give the run's config.yaml with --model-config, and its tokenizer.json with --tokenizer"
        raise UserError(where, f"does not contain {missing[0]} of the model", hint)
    model = validate(ModelConfig, identity_section(identity, "model"), "model.")
    layers = tuple(parse_pattern(model.pattern))
    mixers = {name: _validate_mixer(name, identity_section(identity, f"mixers.{name}")) for name in sorted(set(layers))}
    return SavedModel(
        model=model, layers=layers, mixers=mixers, vocab_size=identity[VOCAB_SIZE], seq_length=identity[SEQ_LENGTH]
    )


def _validate_mixer(name: str, fields: dict[str, Any]) -> Any:
    return validate(find_settings_class(name, "model.pattern"), fields, f"mixers.{name}.")


def identity_of(saved: SavedModel, precision: str) -> dict[str, Any]:
    """Return the identity of a model, from which `saved_model` restores an equal model.

    Args:
        saved: the model.
        precision: precision of the run.
    """
    mixers = {name: mixer_fields(config) for name, config in saved.mixers.items()}
    return model_identity(saved.model, mixers, saved.seq_length, saved.vocab_size, precision)


def mixer_fields(config: Any) -> dict[str, Any]:
    """Return a mixer's complete configuration as plain values."""
    fields: dict[str, Any] = TypeAdapter(type(config)).dump_python(config, mode="json")
    return fields


def configured_model(path: Path, vocab_size: int) -> SavedModel:
    """Return the model that a run's configuration file (YAML) describes.

    Only `model`, `mixers` and `data.seq_length` are read.

    Args:
        path: the file.
        vocab_size: number of tokens of the tokenizer.

    Raises:
        UserError: the file or one of its fields is invalid.
    """
    from megatron_ext.mixers.core.registry import load_all

    config = load_config(path, ["data.path=none"], load_all())
    layers = tuple(parse_pattern(config.model.pattern))
    return SavedModel(
        model=config.model,
        layers=layers,
        mixers={name: _validate_mixer(name, config.mixers[name]) for name in sorted(set(layers))},
        vocab_size=vocab_size,
        seq_length=config.data.seq_length,
    )


def shape_of(saved: SavedModel, precision: str = "fp32") -> ModelShape:
    """Return the arguments to build the model in a single process."""
    from megatron_ext.model.shape import ModelShape
    from megatron_ext.platform.device import DTYPES

    assert precision in DTYPES
    return ModelShape(
        model=saved.model,
        mixers=saved.layers,
        mixer_configs=saved.mixers,
        parallel=ParallelConfig(),
        vocab_size=saved.vocab_size,
        precision=precision,
        recompute="none",
        backend="local",
    )
