"""Layers of flash-linear-attention (fla), with settings that match our defaults."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from kernels.bench.contestant import NotRun
from megatron_ext.bench.layers.cases import LayerShape, Size
from megatron_ext.bench.layers.flash_attention import install_flash_attn_replacement
from megatron_ext.bench.layers.layer import Layer


def _heads(size: Size) -> dict[str, Any]:
    return {"hidden_size": size.hidden, "num_heads": size.heads}


LAYERS: dict[str, tuple[str, Callable[[Size], dict[str, Any]]]] = {
    "attention": ("Attention", _heads),
    "based": ("BasedLinearAttention", lambda s: {**_heads(s), "num_key_value_heads": s.heads}),
    "deltanet": ("DeltaNet", _heads),
    "gated_deltanet": ("GatedDeltaNet", lambda s: {**_heads(s), "head_dim": s.head_dim, "expand_v": 1}),
    "gla": ("GatedLinearAttention", lambda s: {**_heads(s), "expand_k": 1.0, "expand_v": 2.0}),
    "linear_attention": ("LinearAttention", lambda s: {**_heads(s), "feature_map": "elu"}),
    "mamba": ("Mamba", lambda s: {"hidden_size": s.hidden, "intermediate_size": 2 * s.hidden}),
    "mamba2": ("Mamba2", lambda s: {**_heads(s), "head_dim": 2 * s.head_dim, "n_groups": s.heads}),
    "moba": ("MoBA", lambda s: {**_heads(s), "moba_chunk_size": 512, "moba_topk": 3}),
    "nsa": ("NativeSparseAttention", lambda s: {**_heads(s), "num_kv_heads": 1, "head_dim": s.head_dim}),
    "retnet": ("MultiScaleRetention", lambda s: {**_heads(s), "expand_k": 1.0, "expand_v": 2.0}),
    "rwkv6": ("RWKV6Attention", lambda s: {**_heads(s), "expand_k": 1.0}),
    # Layer 0 has no value residual, like all layers of ours. The number of layers only affects its initial weights.
    "rwkv7": ("RWKV7Attention", lambda s: {"hidden_size": s.hidden, "head_dim": s.head_dim, "layer_idx": 0,
                                           "num_hidden_layers": 12}),
}  # fmt: skip
"""Class name and arguments of fla's layer by our mixer's name. fla has no Top-1 Element and no Top-1 Chunk."""

NEEDS_MAMBA_SSM = ("mamba", "mamba2")
CALLS_FLASH_ATTN = ("attention", "moba", "nsa")
TORCH_ATTENTION_NOTE = "flash-attn is not installed, so torch's FlashAttention-2 replaces it"


def build(name: str, shape: LayerShape, device: torch.device) -> Layer:
    """Build fla's layer for the named mixer in bf16, with fla's initialization.

    Raises:
        NotRun: fla is not installed, or a library without which this layer falls back to plain torch.
    """
    _require_fla()
    note = TORCH_ATTENTION_NOTE if name in CALLS_FLASH_ATTN and install_flash_attn_replacement() else None
    module = construct(name, shape.size)
    if name in NEEDS_MAMBA_SSM and not import_module(type(module).__module__).is_fast_path_available:
        raise NotRun("mamba_ssm is not installed, and without it fla's layer is plain torch")
    module.to(device, torch.bfloat16)

    def run(x: torch.Tensor) -> torch.Tensor:
        out = module(x)
        return out[0] if isinstance(out, tuple) else out

    return Layer(run=run, parameters=tuple(module.parameters()), sequence_first=False, note=note)


def construct(name: str, size: Size) -> torch.nn.Module:
    """Construct fla's module for the named mixer, on the CPU in fp32.

    Raises:
        NotRun: fla is not installed.
    """
    _require_fla()
    layer, arguments = LAYERS[name]
    module: torch.nn.Module = getattr(import_module("fla.layers"), layer)(**arguments(size))
    return module


def _require_fla() -> None:
    if find_spec("fla") is None:
        raise NotRun("flash-linear-attention is not installed: pip install flash-linear-attention")
