"""Family of our own model for transformers, which supports all built-in mixers. Its code is in `selectron_hf`.

Tensors have the same names and shapes as in our checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import ModelConfig
from megatron_ext.config.validate import show, validate
from megatron_ext.conversion.core.family import Rule, SavedModel
from megatron_ext.conversion.core.mixer_settings import find_settings_class
from megatron_ext.utils.errors import UserError

if TYPE_CHECKING:
    from torch.nn import Module

CODE = Path(__file__).parents[1] / "selectron_hf"

AUTO_MAP = {
    "AutoConfig": "configuration_selectron.SelectronConfig",
    "AutoModelForCausalLM": "modeling_selectron.SelectronForCausalLM",
}

HF_NAMES = {
    "num_query_groups": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "tie_embeddings": "tie_word_embeddings",
    "rotary_base": "rope_theta",
    "init_std": "initializer_range",
}
"""Fields of `ModelConfig` for which transformers has its own name. All other fields keep their name."""

_PROJECTIONS = ("in_proj.weight", "out_proj.weight")
_STATEFUL = (*_PROJECTIONS, "norm_weight")
_DELTA = (*_STATEFUL, "conv_weight")
_RWKV = (
    *("r_proj", "k_proj", "v_proj", "out_proj.weight", "group_norm_weight", "group_norm_bias"),
    *("mu", "decay_down", "decay_up", "decay_base", "bonus"),
)

PARAMETERS: dict[str, tuple[str, ...]] = {
    "attention": _PROJECTIONS,
    "top1_element": _PROJECTIONS,
    "top1_chunk": _PROJECTIONS,
    "moba": _PROJECTIONS,
    "nsa": _PROJECTIONS,
    "based": _PROJECTIONS,
    "linear_attention": _STATEFUL,
    "retnet": _STATEFUL,
    "gla": (*_STATEFUL, "decay_down", "decay_up", "decay_bias"),
    "deltanet": _DELTA,
    "gated_deltanet": (*_DELTA, "log_decay", "step_bias"),
    "mamba": (*_PROJECTIONS, "conv_weight", "conv_bias", "x_proj", "dt_proj", "dt_bias", "A_log", "D"),
    "mamba2": (*_PROJECTIONS, "skip"),  # further parameters depend on its settings, see `_optional_parameters`
    "rwkv6": (*_RWKV, "g_proj", "mu_of_mixing", "mix_down", "mix_up"),
    "rwkv7": (*_RWKV, "rate_down", "rate_up", "rate_base", "gate_down", "gate_up", "removal_scale", "key_rate"),
}
"""Parameter names of each mixer."""

SHIFT_TOKENS = ("rwkv6", "rwkv7")
"""Mixers that perform the token shift themselves in the RWKV-7 block."""


class Selectron:
    """Family of `SelectronForCausalLM`. Implements `Family` and `HasModelCode`.

    Attributes:
        code: Python files of the model.
    """

    architecture = "SelectronForCausalLM"
    code: Sequence[Path] = tuple(sorted(path for path in CODE.glob("*.py") if path.stem != "__init__"))

    def unsupported_reason(self, saved: SavedModel) -> str | None:
        """Implement `Family.unsupported_reason`."""
        unknown = sorted(set(saved.layers) - set(PARAMETERS))
        return f"it has no {', '.join(unknown)} layers" if unknown else None

    def config(self, saved: SavedModel) -> dict[str, Any]:
        """Implement `Family.config`."""
        model = dataclasses.asdict(saved.model)
        return {
            "architectures": [self.architecture],
            "model_type": "selectron",
            "auto_map": dict(AUTO_MAP),
            "vocab_size": saved.vocab_size,
            "num_hidden_layers": len(saved.layers),
            "layer_mixers": list(saved.layers),
            "mixers": {name: dataclasses.asdict(saved.mixers[name]) for name in sorted(set(saved.layers))},
            "seq_length": saved.seq_length,
            **{HF_NAMES.get(name, name): value for name, value in model.items()},
        }

    def saved_model(self, config: dict[str, Any]) -> SavedModel:
        """Implement `Family.saved_model`."""
        names = [field.name for field in dataclasses.fields(ModelConfig)]
        fields = {name: _field(config, HF_NAMES.get(name, name)) for name in names}
        model = validate(ModelConfig, fields, "config.json: ")
        layers = parse_pattern(model.pattern)
        if _field(config, "layer_mixers") != layers:
            hint = "only one of them was changed: give the original file"
            raise UserError("config.json: layer_mixers", f"differs from pattern {model.pattern!r}", hint)
        return SavedModel(
            model=model,
            layers=tuple(layers),
            mixers={name: _mixer(name, _field(config, "mixers")) for name in sorted(set(layers))},
            vocab_size=_positive_int(config, "vocab_size"),
            seq_length=_positive_int(config, "seq_length"),
        )

    def model(self, config: dict[str, Any]) -> Module:
        """Implement `HasModelCode.model`."""
        from megatron_ext.conversion.huggingface.selectron_hf.configuration_selectron import SelectronConfig
        from megatron_ext.conversion.huggingface.selectron_hf.modeling_selectron import SelectronForCausalLM

        model: Module = SelectronForCausalLM(SelectronConfig(**config))
        return model

    def rotary_modules(self) -> list[ModuleType]:
        """Implement `HasModelCode.rotary_modules`."""
        from megatron_ext.conversion.huggingface.selectron_hf import mixer_selectron

        return [mixer_selectron]

    def rules(self, saved: SavedModel) -> Iterator[Rule]:
        """Implement `Family.rules`."""
        for name in tensor_names(saved):
            yield Rule((name,), (name,), list, list)


def _field(config: Mapping[str, Any], name: str) -> Any:
    if name not in config:
        raise UserError(f"config.json: {name}", "missing", "give the file as it was written")
    return config[name]


def _positive_int(config: Mapping[str, Any], name: str) -> int:
    value = _field(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"config.json: {name}", f"{show(value)} is not a whole number above 0", "give one")
    return value


def _mixer(name: str, mixers: Any) -> Any:
    settings_class = find_settings_class(name, "config.json: layer_mixers")
    if not isinstance(mixers, Mapping) or name not in mixers:
        raise UserError(f"config.json: mixers.{name}", "missing", "give the file as it was written")
    return validate(settings_class, mixers[name], f"config.json: mixers.{name}.")


def tensor_names(saved: SavedModel) -> Iterator[str]:
    """Yield the tensor names of the model, which are the same in our checkpoints and in the exported model."""
    yield "embedding.word_embeddings.weight"
    if any(getattr(saved.mixers[name], "position_encoding", None) == "learned" for name in saved.layers):
        yield "embedding.position_embeddings.weight"
    for layer, mixer in enumerate(saved.layers):
        for name in _layer_names(saved.model, mixer, saved.mixers[mixer]):
            yield f"decoder.layers.{layer}.{name}"
    yield from _norm_names(saved.model, "decoder.final_layernorm")
    if not saved.model.tie_embeddings:
        yield "output_layer.weight"


def _layer_names(model: ModelConfig, mixer: str, settings: Any) -> Iterator[str]:
    has_token_shift = model.block == "rwkv7"
    yield from _norm_names(model, "input_layernorm", has_token_shift and mixer not in SHIFT_TOKENS)
    names = [*PARAMETERS[mixer], *(_optional_parameters(settings) if mixer == "mamba2" else ())]
    yield from (f"self_attention.{name}" for name in names)
    if model.block != "mixer":
        yield from _norm_names(model, "pre_mlp_layernorm", has_token_shift)
        yield from ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")


def _norm_names(model: ModelConfig, name: str, has_token_shift: bool = False) -> Iterator[str]:
    norm = f"{name}.norm" if has_token_shift else name
    yield f"{norm}.weight"
    if model.normalization == "layer_norm":
        yield f"{norm}.bias"
    if has_token_shift:
        yield f"{name}.mu"


def _optional_parameters(settings: Any) -> Iterator[str]:
    """Yield the parameters of Mamba-2 that depend on its settings."""
    if settings.convolution:
        yield from ("conv_weight", "conv_bias")
    if settings.decay != "none":
        yield from ("log_decay", "step_bias")
    if settings.group_norm:
        yield "group_norm_weight"
