"""Function that each rank runs: train and report the FLOPs per token."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from megatron_ext.config.load import load_config
from megatron_ext.config.rules import check
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.training.loop import TrainingLoop
from megatron_ext.training.resilience.stopping import StopRequest
from megatron_ext.training.run import train


def flops_per_token(rank: int, world_size: int, path: Path, overrides: list[str]) -> float:
    """Train, and return the FLOPs per token that MFU is computed from."""
    mixers, found, run = load_all(), [], TrainingLoop.run
    config = load_config(path, overrides, mixers)
    check(config, world_size, mixers)

    def noting(loop: TrainingLoop, stop: StopRequest) -> bool:
        found.append(loop.flops_per_token)
        return run(loop, stop)

    # The pool owns the process group, so the run must not destroy it.
    with patch("torch.distributed.destroy_process_group"), patch.object(TrainingLoop, "run", noting):
        train(config)
    return found[0]
