"""Files in a run folder that are written before the first step."""

from __future__ import annotations

import json
from typing import Any

from megatron_ext.checkpoint.folder import CheckpointFolder, Progress
from megatron_ext.config.effects import flat
from megatron_ext.data import skipped_shards
from megatron_ext.data.datasets import RunData
from megatron_ext.data.failed import remove_failed_records
from megatron_ext.data.verified import write_verified
from megatron_ext.run_folder.heartbeat import remove_heartbeats
from megatron_ext.run_folder.layout import CHECKPOINTS, EVALUATION, METRICS, MODEL
from megatron_ext.runs.config_files import save_run_config
from megatron_ext.runs.identity import CHANGED, DATA
from megatron_ext.runs.tokenizer import store_tokenizer
from megatron_ext.training.records import RunRecords, copy_records
from megatron_ext.training.resilience.decisions import copy_decisions
from megatron_ext.training.run_context import RunContext
from megatron_ext.utils.atomic_files import os_error_reason, write_atomically
from megatron_ext.utils.errors import UserError

DIGEST_LENGTH = 16
"""Hexadecimal digits of a data digest that each record contains."""


def create_files(
    context: RunContext, data: RunData, progress: Progress, description: dict[str, Any]
) -> RunRecords | None:
    """Create the run folder and its files on the first rank, after all other checks.

    Args:
        context: settings and environment of the run.
        data: data of the run.
        progress: progress that the run starts from.
        description: content of `model.json`.

    Returns:
        The opened records; None except on the first rank.

    Raises:
        UserError: the lock is lost, or a file cannot be written.
    """
    if context.lock is None:
        return None
    context.lock.check()
    config, step, guard = context.config, progress.step, context.lock.check_if_due
    try:
        _write_files(context, data, step, description)
        digests = {METRICS: data.record["train"][:DIGEST_LENGTH], EVALUATION: data.record["evaluation"][:DIGEST_LENGTH]}
        settings = {**flat(config), **{key: value for key, value in description.items() if key not in (DATA, CHANGED)}}
        return RunRecords(
            context.folder,
            config.run.name,
            step,
            config.training.steps,
            guard,
            digests,
            config.logging.backends,
            settings,
        )
    except OSError as error:
        problem = f"cannot be written ({os_error_reason(error)})"
        raise UserError(str(context.folder), problem, "choose another run.dir") from error


def _write_files(context: RunContext, data: RunData, step: int, description: dict[str, Any]) -> None:
    folder, branch = context.folder, context.branch
    folder.mkdir(parents=True, exist_ok=True)
    save_run_config(context.config, folder, step)
    write_atomically(folder / MODEL, (json.dumps(description, indent=1) + "\n").encode())
    if branch is not None:
        copy_records(branch.run, folder)
        copy_decisions(branch.run, folder, branch.step)
        skipped_shards.copy_skipped(branch.run, folder, branch.step)
    skipped_shards.record_skipped(folder, data.damages, data.samples, step)
    remove_failed_records(folder, {damage.shard for damage in data.damages})
    if data.verified:
        write_verified(folder, data.verified)
    store_tokenizer(data.tokenizer_file, data.manifest.tokenizer, folder)
    remove_heartbeats(folder)
    if step and branch is None:
        CheckpointFolder(folder / CHECKPOINTS).set_latest(step)  # before later records are dropped
