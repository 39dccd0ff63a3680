"""Size of a run's model: its parameters, and the FLOPs from which MFU is computed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import torch
import torch.distributed as dist

from megatron_ext.config.schema import RunConfig
from megatron_ext.data.lengths import PackedSamples, document_lengths
from megatron_ext.model.build import packed_flops_per_token
from megatron_ext.model.shape import ModelShape
from megatron_ext.parallel.parameters import ParameterCount, count_parameters
from megatron_ext.platform.device import DTYPES, Platform
from megatron_ext.training.trainer import Trainer


def flops_and_peak(
    config: RunConfig, shape: ModelShape, trainer: Trainer, samples: PackedSamples | None
) -> tuple[float, float | None]:
    """Return the model FLOPs per token and the peak FLOP/s, from which MFU is computed.

    A collective call. Call it where the optimizer's parameters are `whole`.

    Args:
        config: configuration of the run.
        shape: shape of its model.
        trainer: trainer that holds the model.
        samples: training samples. With `data.reset_attention`, the document lengths of the first samples determine how
            many tokens each token attends to. None: each sample counts as one document.

    Returns:
        FLOPs per token of the forward and backward pass of the whole model, and the summed peak in FLOP/s of all
        devices; None where the peak is unknown.
    """
    platform = trainer.platform
    lengths = Counter({config.data.seq_length: 1})
    if config.data.reset_attention and samples is not None:
        lengths = document_lengths(samples)
    flops = packed_flops_per_token(shape, trainer.optimizer.chunks, lengths)
    peak = platform.peak_flops(DTYPES[config.training.precision])
    flops = sum_over_ranks(flops, platform, trainer.groups.pp)
    return flops, None if peak is None else sum_over_ranks(peak, platform)


def model_size(trainer: Trainer) -> ParameterCount:
    """Count the parameters of the whole model; a collective call where the optimizer's parameters are `whole`."""
    counts = asdict(count_parameters(trainer.optimizer.chunks, trainer.groups.tp.size())).items()
    return ParameterCount(
        **{name: int(sum_over_ranks(count, trainer.platform, trainer.groups.pp)) for name, count in counts}
    )


def sum_over_ranks(value: float, platform: Platform, group: dist.ProcessGroup | None = None) -> float:
    """Return the sum of a number over the ranks of a group (None: all ranks), in float64; a collective call."""
    total = torch.tensor(value, dtype=torch.float64, device=platform.device)
    dist.all_reduce(total, group=group)
    return float(total)
