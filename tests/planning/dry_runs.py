"""Functions that the tests of plans run in a separate process without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.config.derive import derive
from megatron_ext.config.load import load_config
from megatron_ext.config.rules import check
from megatron_ext.config.schema import RunConfig
from megatron_ext.mixers.core.registry import load_all

EXAMPLES = Path(__file__).parents[2] / "examples"
ONE_GPU = ("parallel.tensor=1", "parallel.sequence=false", "parallel.context=1")
BIG = "1p3b_100k.yaml"
LAYOUT = (
    "parallel.tensor=2",
    "parallel.context=4",
    "parallel.context_transport=nccl",
    "parallel.context_exchange_rounds=1",
    "training.recompute=full",
)
"""Overrides that make the tests independent of the layout in the example."""

TOKENS = 50304


def configured(overrides: Sequence[str], world_size: int = 1, example: str = BIG) -> RunConfig:
    """Load an example with overrides, and check and complete it for a world size."""
    config = load_config(EXAMPLES / example, [*(LAYOUT if example == BIG else ()), *overrides], load_all())
    check(config, world_size, load_all())
    return derive(config)


def as_measured(row: Mapping[str, Any]) -> RunConfig:
    """Configuration of a row in a report of `selectron bench train`."""
    configuration = row["configuration"]
    fields = ("global_batch_size", "micro_batch_size", "recompute")
    overrides = [f"data.seq_length={configuration['data']['seq_length']}", *row["overrides"]]
    overrides += [f"training.{field}={configuration['training'][field]}" for field in fields]
    overrides += [
        f"parallel.{field}={value}" for field, value in configuration["parallel"].items() if value is not None
    ]
    return configured(overrides, row["processes"])


def footprint(config: RunConfig, world_size: int = 1, rank: int = 0) -> Any:
    """Return `dry_step.footprint` of a configuration."""
    from megatron_ext.planning import dry_step

    return dry_step.footprint(config, TOKENS, world_size, rank)


def layer_bytes(mixer: str, hidden_size: int, heads: int, head_dim: int, length: int, batch: int) -> int:
    """Peak bytes of one mixer's forward and backward pass, without its weights and hidden states."""
    import torch
    from megatron.core.transformer.spec_utils import build_module

    from kernels.meta.unlaunched import unlaunched
    from megatron_ext.config.schema import ParallelConfig
    from megatron_ext.model.build import transformer_config
    from megatron_ext.model.meta_device import on_meta
    from megatron_ext.model.single_mixer import lone_mixer_shape
    from megatron_ext.model.specs import mixer_spec
    from megatron_ext.planning.dry_step import count_fused_kernels
    from megatron_ext.planning.ledger import Ledger, LedgerMode, Purpose
    from megatron_ext.planning.virtual_gpu import groups_of_rank, virtual_gpu

    gpu, ledger = virtual_gpu(), Ledger()
    groups = 1 if mixer == "nsa" else None  # as in the benchmark of layers
    sizes = {"hidden_size": hidden_size, "heads": heads, "head_dim": head_dim, "length": length, "groups": groups}
    shape = lone_mixer_shape(mixer, **sizes)
    with groups_of_rank(ParallelConfig(), 1, 0) as process_groups:
        with on_meta():
            spec = mixer_spec(mixer, shape.mixer_configs[mixer], shape.backend)
            config = transformer_config(shape, gpu)
            module = build_module(spec, config=config, layer_number=1, pg_collection=process_groups)
            x = torch.empty(length, batch, hidden_size, dtype=torch.bfloat16, requires_grad=True)
            grad = torch.empty_like(x)
        mode = LedgerMode(ledger, lambda: Purpose("mixer", 1, "forward"))
        mode.exclude([*module.parameters(), *module.buffers(), x, grad])
        with count_fused_kernels(), unlaunched(), mode:
            out, _ = module(x)
            torch.autograd.backward(out, grad)
            del out
    return ledger.peak
