"""Base class of architectures whose layers all have the same mixer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar

from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import DataConfig, ModelConfig
from megatron_ext.config.validate import show, validate
from megatron_ext.conversion.core.family import Rule, SavedModel
from megatron_ext.conversion.huggingface.families.fields import Fields, where
from megatron_ext.conversion.huggingface.families.tensors import add_prefixes, rename_rule
from megatron_ext.mixers.core.settings import SETTINGS
from megatron_ext.utils.errors import UserError

SECTION = "selectron"
"""Field of config.json with the values of our model that its other fields cannot express, such as initialization."""


DEFAULT_LENGTH = DataConfig(path="").seq_length
"""Tokens per sample if config.json contains no number of positions: the default of a run."""


class OneMixerFamily(ABC):
    """Architecture whose layers all have the same mixer.

    A subclass defines the field names of config.json and the tensor names. Values of our model that these fields do not
    determine are written to the section `SECTION` of config.json. Other libraries keep this section and ignore it.
    """

    architecture: str
    """Name in the `architectures` field of config.json."""
    model_type: ClassVar[str]
    """Value of `model_type` in config.json."""
    mixer: ClassVar[str]
    """Name of our mixer."""
    block: ClassVar[str]
    """Value of `model.block` that the architecture has."""
    normalization: ClassVar[str] = "rms_norm"
    """Value of `model.normalization` that the architecture has."""
    defaults: ClassVar[Mapping[str, Any]]
    """Defaults of the architecture for the fields of config.json that are read."""

    # Names of the architecture's modules.
    embedding: ClassVar[str]
    final_norm: ClassVar[str]
    layer: ClassVar[str]
    mixer_name: ClassVar[str]

    @abstractmethod
    def unsupported_mixer_reason(self, model: ModelConfig, mixer: Any) -> str | None:
        """Return the reason why the architecture does not support the mixer's configuration; None if it does.

        Layers, block and normalization have already been checked.
        """

    @abstractmethod
    def config_fields(self, model: ModelConfig, mixer: Any) -> dict[str, Any]:
        """Return the fields of config.json that are specific to this architecture."""

    @abstractmethod
    def read(self, fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields of `ModelConfig` and of the mixer's configuration; the inverse of `config_fields`.

        Raises:
            UserError: config.json has a value that our model does not support.
        """

    @abstractmethod
    def mixer_rules(self, model: ModelConfig, mixer: Any) -> Iterator[Rule]:
        """Yield the rules for a layer's mixer, with names relative to the mixer."""

    @abstractmethod
    def layer_rules(self, model: ModelConfig) -> Iterator[Rule]:
        """Yield the rules for the rest of a layer, with names relative to the layer."""

    def unsupported_reason(self, saved: SavedModel) -> str | None:
        """Implement `Family.unsupported_reason`."""
        others = sorted(set(saved.layers) - {self.mixer})
        if others:
            return f"model.pattern has {', '.join(others)}, but all layers of the architecture are {self.mixer}"
        if saved.model.block != self.block:
            return f"model.block is {saved.model.block}, but the architecture's block is {self.block}"
        if saved.model.normalization != self.normalization:
            return f"model.normalization is {saved.model.normalization}, but the architecture uses {self.normalization}"
        return self.unsupported_mixer_reason(saved.model, saved.mixers[self.mixer])

    def config(self, saved: SavedModel) -> dict[str, Any]:
        """Implement `Family.config`."""
        fields = self._all_fields(saved)
        section = _differences(saved, self._read(fields), self.mixer)
        return fields | ({SECTION: section} if section else {})

    def _all_fields(self, saved: SavedModel) -> dict[str, Any]:
        model = saved.model
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": saved.vocab_size,
            "hidden_size": model.hidden_size,
            "num_hidden_layers": len(saved.layers),
            "tie_word_embeddings": model.tie_embeddings,
            "initializer_range": model.init_std,
            **self.config_fields(model, saved.mixers[self.mixer]),
        }

    def saved_model(self, config: dict[str, Any]) -> SavedModel:
        """Implement `Family.saved_model`."""
        base = self._read(config)
        if SECTION not in config:
            return base
        saved = _apply_section(base, config[SECTION], self.mixer)
        if (
            set(saved.layers) != {self.mixer}
            or self.unsupported_reason(saved)
            or self._all_fields(saved) != self._all_fields(base)
        ):
            raise UserError(
                where(SECTION), "contradicts the other fields", f"remove the wrong field, or all of {SECTION}"
            )
        return saved

    def _read(self, config: dict[str, Any]) -> SavedModel:
        defaults = {"initializer_range": 0.02, "max_position_embeddings": DEFAULT_LENGTH, **self.defaults}
        fields = Fields(config, defaults)
        model, mixer = self.read(fields)
        pattern = f"{self.mixer}*{fields.layers('num_hidden_layers')}"
        model = {
            "pattern": pattern,
            "block": self.block,
            "normalization": self.normalization,
            "hidden_size": fields.positive_int("hidden_size"),
            "num_query_groups": model["num_attention_heads"],
            "max_position_embeddings": fields.positive_int("max_position_embeddings"),
            "tie_embeddings": fields.flag("tie_word_embeddings"),
            "init_std": fields.positive_number("initializer_range"),
            **model,
        }
        return SavedModel(
            model=validate(ModelConfig, model, where("")),
            layers=tuple(parse_pattern(pattern)),
            mixers={self.mixer: validate(SETTINGS[self.mixer], mixer, where(""))},
            vocab_size=fields.positive_int("vocab_size"),
            seq_length=model["max_position_embeddings"],
        )

    def rules(self, saved: SavedModel) -> Iterator[Rule]:
        """Implement `Family.rules`."""
        yield rename_rule("embedding.word_embeddings.weight", f"{self.embedding}.weight")
        yield from self.norm_rules(saved.model, "decoder.final_layernorm", self.final_norm)
        if not saved.model.tie_embeddings:
            yield rename_rule("output_layer.weight", "lm_head.weight")
        for index in range(len(saved.layers)):
            ours, theirs = f"decoder.layers.{index}.", f"{self.layer}.{index}."
            yield from add_prefixes(self.layer_rules(saved.model), ours, theirs)
            mixer_rules = self.mixer_rules(saved.model, saved.mixers[self.mixer])
            yield from add_prefixes(mixer_rules, f"{ours}self_attention.", f"{theirs}{self.mixer_name}.")

    def norm_rules(self, model: ModelConfig, ours: str, theirs: str) -> Iterator[Rule]:
        """Yield the rules for one of the norms."""
        for name in ("weight", "bias") if model.normalization == "layer_norm" else ("weight",):
            yield rename_rule(f"{ours}.{name}", f"{theirs}.{name}")


def _differences(saved: SavedModel, read: SavedModel, mixer: str) -> dict[str, Any]:
    """Return the values of a model that config.json does not determine, in the form that `_apply_section` reads.

    Args:
        saved: the model.
        read: the model as read from config.json without the section.
        mixer: name of the mixer.
    """
    pairs: dict[str, tuple[Any, Any]] = {
        "model": (saved.model, read.model),
        "mixer": (saved.mixers[mixer], read.mixers[mixer]),
    }
    differences: dict[str, Any] = {}
    for name, (ours, base) in pairs.items():
        changed = {key: value for key, value in asdict(ours).items() if value != getattr(base, key)}
        if changed:
            differences[name] = changed
    return differences | ({"seq_length": saved.seq_length} if saved.seq_length != read.seq_length else {})


def _apply_section(base: SavedModel, section: Any, mixer: str) -> SavedModel:
    """Return the model as read from config.json, with the values of the section applied."""
    prefix = where(SECTION)
    parts: dict[str, Any] = {"model": {}, "mixer": {}, "seq_length": base.seq_length}
    if not isinstance(section, dict) or not section.keys() <= parts.keys():
        raise UserError(prefix, f"{show(section)} is not a valid section", "remove it")
    values = parts | section
    for name in ("model", "mixer"):
        if not isinstance(values[name], dict):
            raise UserError(f"{prefix}.{name}", f"{show(values[name])} is not a mapping of fields", "remove it")
    model = validate(ModelConfig, asdict(base.model) | values["model"], f"{prefix}.model.")
    settings = asdict(base.mixers[mixer]) | values["mixer"]
    return replace(
        base,
        model=model,
        layers=tuple(parse_pattern(model.pattern)),
        mixers={mixer: validate(type(base.mixers[mixer]), settings, f"{prefix}.mixer.")},
        seq_length=Fields(values, {}).positive_int("seq_length"),
    )
