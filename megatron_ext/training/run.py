"""Training of a run from its configuration."""

from __future__ import annotations

import torch.distributed as dist

from megatron_ext.config.schema import RunConfig
from megatron_ext.data.datasets import RunData
from megatron_ext.data.failed import record_failures
from megatron_ext.parallel.agreement import gather_objects, raise_on_all_ranks
from megatron_ext.parallel.first_rank import print_on_first_rank
from megatron_ext.parallel.watchdog import group_timeout, watchdog
from megatron_ext.platform.device import platform_for_run, start_process_group
from megatron_ext.run_folder.layout import CHECKPOINTS, CONFIG
from megatron_ext.training import trial
from megatron_ext.training.branch import find_branch
from megatron_ext.training.continuing import print_changes
from megatron_ext.training.loop import TrainingLoop
from megatron_ext.training.resilience.stopping import StopRequest, stop_on_signals
from megatron_ext.training.run_builder import RunBuilder
from megatron_ext.training.run_context import RunContext
from megatron_ext.training.run_lock import hold_run_lock
from megatron_ext.training.starting import Resume, check_finished, run_folder, starting_step


def train(
    config: RunConfig, *, resume: Resume = False, from_step: int | None = None, trial_of: RunConfig | None = None
) -> bool:
    """Train as one rank of the world that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Args:
        config: checked configuration with derived fields.
        resume: see `Resume`. If the newest checkpoint is damaged, the previous checkpoint is used, with a warning.
        from_step: continue from the checkpoint of exactly this step.
        trial_of: configuration of the whole run if `config` is a trial of that run (`config.trial`). The next trial
            replaces the trial's folder. The first rank prints the estimate for the whole run.

    Returns:
        True if the run is finished. False if the run was asked to stop and has saved a checkpoint to continue from.

    Raises:
        UserError: the data, the run folder or a checkpoint is invalid, or the disk is full.
    """
    folder = run_folder(config)
    step = starting_step(folder, resume, from_step, is_trial=trial_of is not None)
    if step is not None and step >= config.training.steps:
        check_finished(config, step)
        return True
    branch = None
    if step is None and config.run.branch_from is not None:
        branch = find_branch(config.run.branch_from, config.training.steps)
    with hold_run_lock(folder) as lock, stop_on_signals() as stop:
        if lock is not None:  # another process may have continued the run until it released the lock
            step = starting_step(folder, resume, from_step, is_trial=trial_of is not None)
        platform = platform_for_run(config.run.device, config.parallel)
        start_process_group(platform, group_timeout(config.run.hang_timeout))
        try:
            step, *_ = gather_objects(step)
            branch = branch if step is None else None
            if trial_of is not None:
                raise_on_all_ranks(lambda: trial.prepare_folder(folder) if dist.get_rank() == 0 else None)
            context = RunContext(config, folder, platform, lock, step, is_exact=from_step is not None, branch=branch)
            return _train(context, stop, trial_of)
        finally:
            dist.destroy_process_group()


def _train(context: RunContext, stop: StopRequest, trial_of: RunConfig | None) -> bool:
    """Build the components in the order in which they can fail, train, and print the result."""
    builder = RunBuilder(context)
    start = builder.start()
    trainer = builder.trainer(start)
    loop = builder.loop(start, trainer)
    print_changes(start.changes, loop.records)  # after the last check that can fail, so that an error is printed alone
    _print_unchanged(builder.data)
    finished = _run(context, builder.data, loop, stop)
    if trial_of is None:
        print_on_first_rank(_final_message(context, loop, finished))
    elif dist.get_rank() == 0:
        print(_trial_message(trial_of, context, loop, finished))
    if not finished:
        dist.barrier()  # a launcher that sees a non-zero exit code kills the ranks that are still running
    return finished


def _run(context: RunContext, data: RunData, loop: TrainingLoop, stop: StopRequest) -> bool:
    """Run the loop under the watchdog and close its files. Return True if the run is finished."""
    config = context.config
    skip_damaged = config.data.on_damaged == "skip"
    try:
        with (
            watchdog(config.run.hang_timeout, loop.heartbeat),
            record_failures(context.folder, data.manifest, skip_damaged=skip_damaged),
        ):
            return loop.run(stop)
    finally:
        loop.heartbeat.close()
        if loop.records is not None:
            loop.records.close()


def _print_unchanged(data: RunData) -> None:
    if data.num_unchanged:
        files = f"{data.num_unchanged} of {len(data.verified)} files are unchanged since their sha256 was verified"
        print_on_first_rank(f"data: {files}, and were not read again")


def _final_message(context: RunContext, loop: TrainingLoop, finished: bool) -> str:
    progress, folder = loop.progress, context.folder
    if finished:
        return f"finished: {progress.step} steps, {progress.tokens:,} tokens, in {folder}"
    return (
        f"stopped at step {progress.step} with a checkpoint; "
        f"continue with: selectron train {folder / CONFIG} --processes {dist.get_world_size()} --resume"
    )


def _trial_message(run_config: RunConfig, context: RunContext, loop: TrainingLoop, finished: bool) -> str:
    folder = context.folder
    if finished:
        return trial.write_estimate(run_config, folder, folder / CHECKPOINTS, loop.seconds)
    return f"trial stopped at step {loop.progress.step} of {loop.training.steps}; the next trial replaces {folder}"
