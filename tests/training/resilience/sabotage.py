"""Functions run by each rank: a run in which one rank's gradient is corrupted in some attempts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import whole_run

from megatron_ext.training.build import build_trainer
from megatron_ext.training.trainer import StepResult, Trainer


def run(
    rank: int, world_size: int, path: Path, overrides: list[str], attempts: Sequence[int], factor: float, resume: bool
) -> None:
    """Train. At given attempts, counted from 1, multiply the last rank's gradient of a parameter by a factor."""

    def build(*arguments: Any, **keywords: Any) -> Trainer:
        trainer = build_trainer(*arguments, **keywords)
        parameter = next(iter(trainer.optimizer.chunks[0].parameters()))
        count, compute_gradients = 0, trainer.compute_gradients

        def counted(*arguments: Any) -> StepResult:
            nonlocal count
            count += 1
            return compute_gradients(*arguments)

        def broken(gradient: Any) -> Any:
            return gradient * factor if rank == world_size - 1 and count in attempts else gradient

        parameter.register_hook(broken)
        trainer.compute_gradients = counted  # type: ignore[method-assign]
        return trainer

    with patch("megatron_ext.training.run_builder.build_trainer", build):
        whole_run.run(rank, world_size, path, overrides, resume)
