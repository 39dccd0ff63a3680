"""Megatron's ModuleSpecs from a layer pattern and a back-end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_ext.mixers.core.base import MixerSubmodules
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.model.block_layer import BlockLayer
from megatron_ext.model.rwkv7_block import RWKV7Layer
from megatron_ext.parallel.aligned_linear import AlignedColumnParallelLinear
from megatron_ext.platform.megatron_versions import mlp_spec

Backend = Literal["local", "transformer_engine"]

LAYERS: dict[str, type[TransformerLayer]] = {
    "transformer": BlockLayer,
    "rwkv7": RWKV7Layer,
    "mixer": BlockLayer,
}
"""Layer class around a mixer, by `model.block`."""


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm in Megatron's form: a weight attribute marks that sequence-parallel ranks must sum its gradient.

    Megatron's own wrapper refuses sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm, with bias, in the form of `RMSNorm`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LocalBackend(LocalSpecProvider):
    """Back-end with Megatron's own linear layers and torch's norms."""

    def column_parallel_linear(self) -> type:
        """Return the class of the linear layer whose outputs are sharded over tensor-parallel ranks."""
        return AlignedColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """Return the class of the block's norm. megatron-core passes `has_residual` since 0.17."""
        return RMSNorm if rms_norm else LayerNorm


def provider(backend: Backend) -> BackendSpecProvider:
    """Return the modules of a back-end."""
    if backend == "local":
        return LocalBackend()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def layer_specs(
    mixers: Sequence[str],
    mixer_configs: Mapping[str, Any],
    backend: Backend,
    block: str = "transformer",
    normalization: str = "rms_norm",
) -> list[ModuleSpec]:
    """Return one spec per layer: norm, mixer, residual, and unless the block is `mixer`, norm, feed-forward, residual.

    Args:
        mixers: mixer name of each layer.
        mixer_configs: settings by mixer name.
        backend: source of linear layers and norms.
        block: layer around the mixers, a key of `LAYERS`.
        normalization: rms_norm or layer_norm.
    """
    return [layer_spec(name, mixer_configs[name], backend, block, normalization) for name in mixers]


def mixer_spec(mixer: str, mixer_config: Any, backend: Backend) -> ModuleSpec:
    """Return the spec of the named mixer alone."""
    modules = provider(backend)
    linears = MixerSubmodules(in_proj=modules.column_parallel_linear(), out_proj=modules.row_parallel_linear())
    return ModuleSpec(load_all()[mixer].module, params={"mixer_config": mixer_config}, submodules=linears)


def layer_spec(
    mixer: str, mixer_config: Any, backend: Backend, block: str = "transformer", normalization: str = "rms_norm"
) -> ModuleSpec:
    """Return the spec of one layer with the named mixer; see `layer_specs`."""
    modules = provider(backend)
    column, row = modules.column_parallel_linear(), modules.row_parallel_linear()
    norm = modules.layer_norm(rms_norm=normalization == "rms_norm")
    layer = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=mixer_spec(mixer, mixer_config, backend),
        self_attn_bda=get_bias_dropout_add,
    )
    if block != "mixer":  # Megatron's layer replaces missing submodules by the identity
        layer.pre_mlp_layernorm = norm
        layer.mlp = mlp_spec(column, row)
        layer.mlp_bda = get_bias_dropout_add
    return ModuleSpec(module=LAYERS[block], submodules=layer)
