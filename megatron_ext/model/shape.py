"""Description of a model: sizes, mixers and layout, resolved from a run's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from megatron_ext.config.layout import sequence_parallel
from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import ModelConfig, ParallelConfig, RunConfig
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.model.specs import Backend
from megatron_ext.platform.device import Platform, choose_backend
from megatron_ext.utils.errors import UserError


@dataclass(frozen=True)
class ModelShape:
    """Inputs of model construction other than process groups.

    Attributes:
        model: sizes, with derived fields filled in.
        mixers: mixer name of each layer.
        mixer_configs: settings by mixer name.
        parallel: parallel layout.
        vocab_size: tokens of the tokenizer, before padding.
        precision: bf16 or fp32.
        recompute: none, mlp or full; see `TrainingConfig`.
        backend: source of linear layers and norms.
        fp8: none, tensorwise or blockwise; see `TrainingConfig`.
    """

    model: ModelConfig
    mixers: Sequence[str]
    mixer_configs: Mapping[str, Any]
    parallel: ParallelConfig
    vocab_size: int
    precision: str
    recompute: str
    backend: Backend
    fp8: str = "none"

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding. Independent of the layout, so that checkpoints and losses are, too."""
        multiple = self.model.vocab_size_multiple
        return -(-self.vocab_size // multiple) * multiple

    @property
    def feed_forward_parameters(self) -> int:
        """Weights of a layer's feed-forward: three matrices for SwiGLU, two for RWKV-7's channel mix, or none."""
        matrices = {"transformer": 3, "rwkv7": 2, "mixer": 0}[self.model.block]
        return matrices * self.model.hidden_size * (self.model.ffn_hidden_size or 0)

    @property
    def learns_positions(self) -> bool:
        """True if some layer's mixer requires a learned position table at the input."""
        used = {name: self.mixer_configs[name] for name in self.mixers}
        return any(getattr(config, "position_encoding", None) == "learned" for config in used.values())


def model_shape(config: RunConfig, platform: Platform, vocab_size: int) -> ModelShape:
    """Return the description from which the model is built, for a checked configuration with derived fields."""
    mixers = parse_pattern(config.model.pattern)
    backend, fp8 = choose_backend(config.run.backend, platform), config.training.fp8
    if fp8 != "none" and backend == "local":
        reason = "is not installed" if platform.is_cuda else "needs a GPU"
        hint = "install the extra `selectron[gpu]` on a GPU machine, or set training.fp8=none"
        raise UserError("training.fp8", f"'{fp8}' is computed by Transformer Engine, which {reason}", hint)
    parallel = config.parallel
    if parallel.context_transport == "copy_engine" and parallel.context > 1 and not platform.is_cuda:
        hint = "train on GPUs, or set parallel.context_transport=nccl, which is gloo here"
        raise UserError("parallel.context_transport", "copy_engine, and there is no GPU", hint)
    return ModelShape(
        model=config.model,
        mixers=mixers,
        mixer_configs={name: _mixer_config(config, name) for name in set(mixers)},
        parallel=replace(parallel, sequence=sequence_parallel(config)),
        vocab_size=vocab_size,
        precision=config.training.precision,
        recompute=config.training.recompute,
        backend=backend,
        fp8=fp8,
    )


def _mixer_config(config: RunConfig, name: str) -> Any:
    return TypeAdapter(load_all()[name].config_type).validate_python(config.mixers.get(name, {}), strict=False)
