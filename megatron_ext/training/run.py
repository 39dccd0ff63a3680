"""Training of a run from its configuration.

The components are built in the order in which they can fail.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.checkpoint.folder import CheckpointFolder, Progress, Record, Retention
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.config.effects import flat
from megatron_ext.config.layout import layout_of
from megatron_ext.config.schema import RunConfig
from megatron_ext.data import skipped_shards
from megatron_ext.data.datasets import RunData, open_data, packing_of
from megatron_ext.data.failed import forget_failed, noting, read_failed
from megatron_ext.data.lengths import PackedSamples, document_lengths
from megatron_ext.data.verified import read_verified, write_verified
from megatron_ext.evaluation.domains import DomainEvaluator, evaluation_domains
from megatron_ext.evaluation.during_training import SuitesBetweenSteps
from megatron_ext.evaluation.registry import check_suites
from megatron_ext.evaluation.suite import EvalContext
from megatron_ext.model.build import packed_flops_per_token
from megatron_ext.model.shape import ModelShape, model_shape
from megatron_ext.parallel.agreement import gather_objects, raise_on_all_ranks
from megatron_ext.parallel.first_rank import say_on_first_rank
from megatron_ext.parallel.groups import make_process_groups
from megatron_ext.parallel.parameters import ParameterCount, count_parameters
from megatron_ext.parallel.watchdog import group_timeout, watching
from megatron_ext.platform.device import DTYPES, Platform, platform_of, start_process_group
from megatron_ext.run_folder.heartbeat import Heartbeat, forget
from megatron_ext.run_folder.layout import CHECKPOINTS, CONFIG, EVALUATION, METRICS, MODEL
from megatron_ext.run_folder.lock import RunLock
from megatron_ext.runs.config_files import keep_config
from megatron_ext.runs.identity import CHANGED, DATA, identity
from megatron_ext.runs.tokenizer import coder_of, keep_coder
from megatron_ext.training import trial
from megatron_ext.training.branch import FIELD, Branch, branch_of
from megatron_ext.training.build import build_trainer
from megatron_ext.training.continuing import Continuing, GoesOn, say_goes_on
from megatron_ext.training.header import header
from megatron_ext.training.loop import TrainingLoop
from megatron_ext.training.records import RunRecords, copy_records
from megatron_ext.training.resilience.decisions import copy_decisions, place_in_data
from megatron_ext.training.resilience.recovery import Recovery
from megatron_ext.training.resilience.stopping import StopRequest, stop_on_signals
from megatron_ext.training.resilience.stragglers import Stragglers
from megatron_ext.training.run_lock import holding
from megatron_ext.training.starting import Resume, check_finished, run_folder, starting_step
from megatron_ext.training.trainer import Trainer
from megatron_ext.utils.atomic_files import os_reason, write_whole
from megatron_ext.utils.errors import UserError

DIGITS = 16
"""Hexadecimal digits of a data digest that each record contains."""


def train(
    config: RunConfig, *, resume: Resume = False, from_step: int | None = None, trial_of: RunConfig | None = None
) -> bool:
    """Train as one rank of the world that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Args:
        config: checked configuration with derived fields.
        resume: see `Resume`. If the newest checkpoint is damaged, the one before it is used, with a warning.
        from_step: continue from the checkpoint of exactly this step.
        trial_of: configuration of the whole run if `config` is a trial of it (`config.trial`). The next trial replaces
            the trial's folder. The first rank prints the estimate for the whole run.

    Returns:
        True if the run is finished. False if it was asked to stop; it has then saved a checkpoint to continue from.

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
        branch = branch_of(config.run.branch_from, config.training.steps)
    with holding(folder) as lock, stop_on_signals() as stop:
        if lock is not None:  # until it released the lock, another process may have continued the run
            step = starting_step(folder, resume, from_step, is_trial=trial_of is not None)
        platform = platform_of(config.run.device, config.parallel)
        start_process_group(platform, group_timeout(config.run.hang_timeout))
        try:
            step, *_ = gather_objects(step)
            branch = branch if step is None else None
            if trial_of is not None:
                raise_on_all_ranks(lambda: trial.begin(folder) if dist.get_rank() == 0 else None)
            records = partial(_record, step=step, from_step=from_step)
            return _train(config, folder, platform, stop, branch, trial_of, records, lock)
        finally:
            dist.destroy_process_group()


def _record(store: CheckpointStore, step: int | None, from_step: int | None) -> Record | None:
    """Check the checkpoint to continue from and return its record; None: start from the beginning."""
    if step is None or from_step is not None:
        return None if step is None else store.check(step)
    record, damages = store.check_newest()
    for damage in damages:
        instead = f"continuing from step {record.progress.step} instead of step {step}"
        say_on_first_rank(f"selectron: warning: {damage.where}: {damage.problem}; {instead}")
    return record


def _train(
    config: RunConfig,
    folder: Path,
    platform: Platform,
    stop: StopRequest,
    branch: Branch | None,
    trial_of: RunConfig | None,
    record_of: Callable[[CheckpointStore], Record | None],
    lock: RunLock | None,
) -> bool:
    data = open_data(config.data, config.training.seed, read_verified(folder), read_failed(folder))
    for warning in (*data.warnings, *skipped_shards.warnings(data.damages, data.samples)):
        say_on_first_rank(warning)
    groups = make_process_groups(config.parallel, config.training.seed)
    store, begins_at, record, goes_on = _start_of(config, folder, data, groups, platform, branch, record_of, lock)
    shape = model_shape(config, platform, data.vocab_size)
    trainer = build_trainer(config, shape, groups, platform, begins=record is None)
    if record is not None:
        begins_at.load(trainer.optimizer, record)
    if branch is not None:
        branch.check_rate(trainer.optimizer.lr, is_allowed=bool(goes_on.changed))
    loop = _loop(config, folder, data, shape, trainer, store, record, branch, lock)
    say_goes_on(goes_on, loop.records)  # after the last check that can fail: an error is printed alone
    if data.unchanged:
        told = f"{data.unchanged} of {len(data.verified)} files are as they were when their sha256 was compared"
        say_on_first_rank(f"data: {told}, and not read again")
    try:
        skips = config.data.on_damaged == "skip"
        with watching(config.run.hang_timeout, loop.heartbeat), noting(folder, data.manifest, skips=skips):
            finished = loop.run(stop)
    finally:
        loop.heartbeat.close()
        if loop.records is not None:
            loop.records.close()
    if trial_of is None:
        say_on_first_rank(_farewell(folder, loop.progress, finished))
    elif dist.get_rank() == 0:
        print(_of_trial(trial_of, folder, loop, finished))
    if not finished:
        dist.barrier()  # a launcher that sees a non-zero exit code kills the ranks that are still running
    return finished


def _start_of(
    config: RunConfig,
    folder: Path,
    data: RunData,
    groups: ProcessGroupCollection,
    platform: Platform,
    branch: Branch | None,
    record_of: Callable[[CheckpointStore], Record | None],
    lock: RunLock | None,
) -> tuple[CheckpointStore, CheckpointStore, Record | None, GoesOn]:
    """Return the run's store, the store and record (None: no checkpoint) it starts from, and the differences."""
    own = identity(config, data)
    continuing = Continuing(config, own, is_branch=branch is not None)
    store = CheckpointStore(
        folder / CHECKPOINTS,
        own,
        groups,
        platform,
        Retention(config.training.keep_checkpoints, config.training.keep_every),
        asynchronous=config.training.async_checkpoints,
        guard=lock.check if lock is not None else None,
        judge=continuing.compare,
    )
    if branch is None:
        begins_at, record = store, record_of(store)
    else:
        another = f"give another {FIELD}"
        begins_at = CheckpointStore(
            branch.checkpoints.root, {}, groups, platform, another=another, judge=continuing.compare
        )
        record = begins_at.check(branch.step)
    goes_on = GoesOn()
    if record is not None:
        goes_on = continuing.compare(record, begins_at.folder.path(record.progress.step))
    store.identity = {**own, CHANGED: [*goes_on.changed]}
    return store, begins_at, record, goes_on


def _loop(
    config: RunConfig,
    folder: Path,
    data: RunData,
    shape: ModelShape,
    trainer: Trainer,
    store: CheckpointStore,
    record: Record | None,
    branch: Branch | None,
    lock: RunLock | None,
) -> TrainingLoop:
    training, platform = config.training, trainer.platform
    progress = record.progress if record is not None else Progress()
    first, *_ = gather_objects(asdict(place_in_data(folder, progress) if dist.get_rank() == 0 else progress))
    progress = Progress(**first)
    domains = evaluation_domains(
        data.root,
        data.manifest,
        data.train_domains,
        data.test_domains,
        config.data.seq_length,
        training.evaluation_sequences,
    )
    with trainer.optimizer.whole():  # the parameters are counted, so they must be gathered
        flops, peak = flops_and_peak(config, shape, trainer, data.samples)
        size = model_size(trainer)
    suites = _suites(config, folder, data, trainer, progress)
    layout = layout_of(config, dist.get_world_size())
    say_on_first_rank(header(config, folder, data, size, layout, platform, progress))
    about = {**asdict(size), DATA: store.identity[DATA], CHANGED: store.identity[CHANGED]}
    records, packing = _records(config, folder, data, progress, about, branch, lock), packing_of(config.data)
    last_evaluation = _sum_over(0 if records is None else records.last_evaluation, platform, None)
    token, *_ = gather_objects("" if lock is None else lock.token)
    last_suites = _sum_over(0 if records is None else records.last_suites, platform, None)
    return TrainingLoop(
        trainer=trainer,
        samples=data.samples,
        evaluator=DomainEvaluator(trainer, domains, training.micro_batch_size, packing),
        store=store,
        recovery=Recovery(config.resilience, folder, trainer.optimizer, store, records),
        stragglers=Stragglers(config.resilience, training.precision, platform, dist.get_rank(), records),
        heartbeat=Heartbeat(folder, dist.get_rank(), config.resilience.heartbeat_seconds, token),
        training=training,
        layout=layout,
        records=records,
        flops_per_token=flops,
        peak_flops=peak,
        progress=progress,
        last_evaluation=int(last_evaluation),
        packing=packing,
        suites=suites,
        last_suites=int(last_suites),
    )


def _suites(
    config: RunConfig, folder: Path, data: RunData, trainer: Trainer, progress: Progress
) -> SuitesBetweenSteps | None:
    """Return the suites that evaluate the run between steps; None: there are none."""
    options = check_suites(config)
    if not options:
        return None
    entry = data.manifest.tokenizer
    evaluated = EvalContext(
        config=config,
        name=folder.name,
        progress=progress,
        tokenizer_sha256=entry.sha256,
        coder=coder_of(data.tokenizer_file, entry),
        chunks=trainer.optimizer.chunks,
        groups=trainer.groups,
        platform=trainer.platform,
    )
    return SuitesBetweenSteps(evaluated, trainer.optimizer.testing, options, folder)


def _records(
    config: RunConfig,
    folder: Path,
    data: RunData,
    progress: Progress,
    about: dict[str, Any],
    branch: Branch | None,
    lock: RunLock | None,
) -> RunRecords | None:
    """Create the run folder and its files on the first rank, after all other checks; None on the other ranks."""
    if lock is None:
        return None
    lock.check()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        keep_config(config, folder, progress.step)
        write_whole(folder / MODEL, (json.dumps(about, indent=1) + "\n").encode())
        if branch is not None:
            copy_records(branch.run, folder)
            copy_decisions(branch.run, folder, branch.step)
            skipped_shards.copy_skipped(branch.run, folder, branch.step)
        skipped_shards.keep(folder, data.damages, data.samples, progress.step)
        forget_failed(folder, {damage.shard for damage in data.damages})
        if data.verified:
            write_verified(folder, data.verified)
        keep_coder(data.tokenizer_file, data.manifest.tokenizer, folder)
        forget(folder)
        if progress.step and branch is None:
            CheckpointFolder(folder / CHECKPOINTS).go_back(progress.step)  # before later records are dropped
        texts = {METRICS: data.record["train"][:DIGITS], EVALUATION: data.record["evaluation"][:DIGITS]}
        return RunRecords(
            folder,
            config.run.name,
            progress.step,
            config.training.steps,
            lock.check_soon,
            texts,
            config.logging.backends,
            {**flat(config), **{name: value for name, value in about.items() if name not in (DATA, CHANGED)}},
        )
    except OSError as error:
        raise UserError(str(folder), f"cannot be written ({os_reason(error)})", "choose another run.dir") from error


def flops_and_peak(
    config: RunConfig, shape: ModelShape, trainer: Trainer, samples: PackedSamples | None
) -> tuple[float, float | None]:
    """Return the model FLOPs per token and the peak FLOP/s, from which MFU is computed.

    A collective call. Call it where the optimizer's parameters are `whole`.

    Args:
        config: of the run.
        shape: of its model.
        trainer: holds the model.
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
    return _sum_over(flops, platform, trainer.groups.pp), None if peak is None else _sum_over(peak, platform, None)


def model_size(trainer: Trainer) -> ParameterCount:
    """Count the parameters of the whole model; a collective call where the optimizer's parameters are `whole`."""
    counts = asdict(count_parameters(trainer.optimizer.chunks, trainer.groups.tp.size())).items()
    return ParameterCount(**{name: int(_sum_over(n, trainer.platform, trainer.groups.pp)) for name, n in counts})


def _sum_over(value: float, platform: Platform, group: dist.ProcessGroup | None) -> float:
    total = torch.tensor(value, dtype=torch.float64, device=platform.device)
    dist.all_reduce(total, group=group)
    return float(total)


def _farewell(folder: Path, progress: Progress, finished: bool) -> str:
    if finished:
        return f"finished: {progress.step} steps, {progress.tokens:,} tokens, in {folder}"
    return (
        f"stopped at step {progress.step} with a checkpoint; "
        f"continue with: selectron train {folder / CONFIG} --processes {dist.get_world_size()} --resume"
    )


def _of_trial(whole: RunConfig, folder: Path, loop: TrainingLoop, finished: bool) -> str:
    if finished:
        return trial.conclude(whole, folder, folder / CHECKPOINTS, loop.seconds)
    return f"trial stopped at step {loop.progress.step} of {loop.training.steps}; {folder} is removed by the next one"
