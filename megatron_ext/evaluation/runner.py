"""Implementation of `selectron evaluate`: run evaluation suites on a trained model under any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.config.rules import check
from megatron_ext.evaluation.registry import SUITES
from megatron_ext.evaluation.suite import EvalContext, make_folder, results_folder
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.parallel.agreement import raise_on_all_ranks
from megatron_ext.parallel.groups import make_process_groups
from megatron_ext.platform.device import start_process_group
from megatron_ext.runs.identity import TOKENIZER
from megatron_ext.runs.open_run import TrainedRun, load_chunks, open_run

WITHOUT_TRAINING = (
    "optimizer.sharding=none",
    "optimizer.offload=none",
    "optimizer.offload_parameters=none",
    "optimizer.deepspeed=null",
    "training.recompute=none",
)
"""Overrides that switch off the optimizer and recomputation settings of the run, which evaluation does not use."""


def evaluate(
    folder: Path, suites: Mapping[str, Any], *, step: int | None, overrides: Sequence[str], output: Path | None
) -> None:
    """Evaluate as one rank of the world that the environment describes.

    Args:
        folder: run folder.
        suites: options of the requested suites by name, see `evaluation.registry`.
        step: step of the checkpoint; None: the newest.
        overrides: overrides of the run's configuration, `section.field=value`.
        output: folder for the results; None: `evaluation/step_N` in the run folder.

    Raises:
        UserError: the run, its data, the layout or an option is invalid.
    """
    run = open_run(folder, step, [*WITHOUT_TRAINING, *overrides])
    start_process_group(run.platform)
    try:
        _check_layout(run)
        groups = make_process_groups(run.config.parallel, run.seed)
        context = _build_context(run, groups)
        for name, options in suites.items():  # check all before the first one computes for minutes
            _check(name, options, context)
        output = output or results_folder(run.folder, run.record.progress.step)
        raise_on_all_ranks(lambda: make_folder(output))
        context = replace(context, chunks=load_chunks(run, groups))
        for name, options in suites.items():
            result = SUITES[name].test()(context, options, output)
            if result is not None:
                print(result.summary)
    finally:
        dist.destroy_process_group()


def _check(name: str, options: Any, context: EvalContext) -> None:
    """Check options and raise one rank's error on all; `check_domains` is itself collective (ranks share reads)."""
    check_options = SUITES[name].check()
    if name == "domains":
        check_options(context, options)
    else:
        raise_on_all_ranks(lambda: check_options(context, options))


def _build_context(run: TrainedRun, groups: ProcessGroupCollection) -> EvalContext:
    """Return the context of an evaluation, still without weights."""
    return EvalContext(
        config=run.config,
        name=run.folder.name,
        progress=run.record.progress,
        tokenizer_sha256=run.record.identity.get(TOKENIZER),
        tokenizer=run.tokenizer,
        chunks=(),
        groups=groups,
        platform=run.platform,
    )


def _check_layout(run: TrainedRun) -> None:
    """Apply the layout rules of training, with a batch size that any number of ranks can divide."""
    training = run.config.training
    batch = training.micro_batch_size * dist.get_world_size() * run.config.parallel.pipeline
    config = replace(run.config, training=replace(training, global_batch_size=batch))
    check(config, dist.get_world_size(), load_all())
