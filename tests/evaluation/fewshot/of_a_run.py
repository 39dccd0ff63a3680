"""Functions that each rank of `test_exported_run.py` runs: train or evaluate in an existing process group."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from megatron_ext.config.load import load_config
from megatron_ext.config.rules import check
from megatron_ext.evaluation.fewshot.options import FewshotOptions
from megatron_ext.evaluation.runner import evaluate
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.training.run import train


def learn(rank: int, world_size: int, path: Path, overrides: list[str]) -> None:
    """Train as each process of `selectron train` does."""
    mixers = load_all()
    config = load_config(path, overrides, mixers)
    check(config, world_size, mixers)
    with patch("torch.distributed.destroy_process_group"):  # The pool owns the process group.
        train(config, resume=False)


def answer(
    rank: int, world_size: int, run: Path, step: int, options: FewshotOptions, overrides: list[str], output: Path
) -> None:
    """Evaluate as each process of `selectron evaluate --suite fewshot` does."""
    with patch("torch.distributed.destroy_process_group"):
        evaluate(run, {"fewshot": options}, step=step, overrides=overrides, output=output)
