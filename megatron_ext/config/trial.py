"""Configuration of a trial: a few steps of a run's model and layout, to test them before a long run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_ext.config.schema import OptimizerConfig, RunConfig
from megatron_ext.utils.errors import UserError

FOLDER = "trials"
"""Folder of trials inside the folder of runs. Reports only search one level deep and do not find them."""


def trial_config(config: RunConfig, steps: int) -> RunConfig:
    """Shorten a run to a trial: fewer steps, a scaled schedule, each evaluation once, one checkpoint.

    Model, batch, precision, layout and optimizer stay the same. Shards are only checked by size. A run with
    `branch_from` starts from initial weights. A trial logs to files only, not to tracking services.

    Args:
        config: the checked configuration of the whole run.
        steps: steps of the trial.

    Raises:
        UserError: `steps` is below 1 or above those of the run.
    """
    training = config.training
    if not 1 <= steps <= training.steps:
        problem = f"{steps} steps, but the run has training.steps {training.steps}"
        raise UserError("--trial", problem, f"give 1 to {training.steps}")
    return replace(
        config,
        data=replace(config.data, verify="size"),
        training=replace(
            training,
            steps=steps,
            evaluate_every=steps if training.evaluate_every else 0,
            evaluate_suites_every=steps if training.evaluate_suites_every else 0,
            checkpoint_every=steps if training.checkpoint_every else 0,
            keep_every=0,
        ),
        optimizer=_scaled(config.optimizer, training.steps, steps),
        logging=replace(config.logging, backends=[name for name in config.logging.backends if name == "tensorboard"]),
        run=replace(config.run, dir=str(Path(config.run.dir) / FOLDER), branch_from=None),
    )


def _scaled(optimizer: OptimizerConfig, whole: int, steps: int) -> OptimizerConfig:
    """Scale warm-up and decay to fewer steps.

    A schedule with a decay keeps at least one step of it, and at least one step is no warm-up.
    """
    decay = max(1, round(optimizer.decay_steps * steps / whole)) if optimizer.decay_steps else 0
    warmup = min(round(optimizer.warmup_steps * steps / whole), steps - max(1, decay))
    return replace(optimizer, warmup_steps=warmup, decay_steps=decay)
