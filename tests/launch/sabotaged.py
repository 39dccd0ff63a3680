"""Replacement of `python` that runs the command with a fault in training: `python FAULT -m megatron_ext.cli ...`."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron_ext.cli import main
from megatron_ext.training.build import build_trainer
from megatron_ext.training.trainer import StepResult, Trainer

SECONDS = 1.0
FOREVER = 3600


def nan_once(*arguments: Any, **keywords: Any) -> Trainer:
    """Build a trainer in which, before any requeue, rank 1 has a NaN gradient at its fifth attempt."""
    trainer = build_trainer(*arguments, **keywords)
    count, compute_gradients = 0, trainer.compute_gradients

    def counted(*arguments: Any) -> StepResult:
        nonlocal count
        count += 1
        return compute_gradients(*arguments)

    def broken(gradient: Any) -> Any:
        is_due = os.environ["RANK"] == "1" and count == 5 and not restarts()
        return gradient * math.nan if is_due else gradient

    next(iter(trainer.optimizer.chunks[0].parameters())).register_hook(broken)
    trainer.compute_gradients = counted  # type: ignore[method-assign]
    return trainer


def late(*arguments: Any, **keywords: Any) -> Trainer:
    """Build a trainer that is late from its ninth step on, until the job is requeued for the second time.

    At the first start of the job these steps take a second each. At the second, the ninth hangs until SIGKILL.
    """
    trainer = build_trainer(*arguments, **keywords)
    count, compute_gradients = 0, trainer.compute_gradients

    def slow(*arguments: Any) -> StepResult:
        nonlocal count
        count += 1
        if count >= 9 and restarts() < 2:
            time.sleep((SECONDS, FOREVER)[restarts()])  # sleep continues after a signal handler returns
        return compute_gradients(*arguments)

    trainer.compute_gradients = slow  # type: ignore[method-assign]
    return trainer


def restarts() -> int:
    """Return how often Slurm has requeued the job."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0))


FAULTS = {build.__name__: build for build in (nan_once, late)}


def program(folder: Path, fault: str) -> Path:
    """Write a script to pass as the Python interpreter of a launched run."""
    path = folder / fault
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {fault} "$@"\n')
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    assert sys.argv[2:4] == ["-m", "megatron_ext.cli"]
    with patch("megatron_ext.training.run_builder.build_trainer", FAULTS[sys.argv[1]]):
        sys.exit(main(sys.argv[4:]))
