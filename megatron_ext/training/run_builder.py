"""Construction of the components of a run, one method for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_ext.checkpoint.folder import Progress, Record, Retention
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.config.layout import layout_of
from megatron_ext.data import skipped_shards
from megatron_ext.data.datasets import open_data, packing_from_config
from megatron_ext.data.failed import read_failed
from megatron_ext.data.verified import read_verified
from megatron_ext.evaluation.domains import DomainEvaluator, evaluation_domains
from megatron_ext.evaluation.during_training import SuitesBetweenSteps
from megatron_ext.evaluation.registry import check_suites
from megatron_ext.evaluation.suite import EvalContext
from megatron_ext.evaluation.token_classes.building import ClassifierSource
from megatron_ext.model.shape import ModelShape, model_shape
from megatron_ext.parallel.agreement import gather_objects
from megatron_ext.parallel.first_rank import print_on_first_rank
from megatron_ext.parallel.groups import make_process_groups
from megatron_ext.run_folder.heartbeat import Heartbeat
from megatron_ext.run_folder.layout import CHECKPOINTS
from megatron_ext.runs.identity import CHANGED, DATA, identity
from megatron_ext.runs.tokenizer import load_tokenizer
from megatron_ext.training.branch import FIELD, Branch
from megatron_ext.training.build import build_trainer
from megatron_ext.training.continuing import CheckpointChanges, Continuation
from megatron_ext.training.header import format_header
from megatron_ext.training.loop import TrainingLoop
from megatron_ext.training.model_size import flops_and_peak, model_size, sum_over_ranks
from megatron_ext.training.resilience.decisions import resumed_progress
from megatron_ext.training.resilience.recovery import Recovery
from megatron_ext.training.resilience.stragglers import Stragglers
from megatron_ext.training.run_context import RunContext
from megatron_ext.training.run_files import create_files
from megatron_ext.training.trainer import Trainer
from megatron_ext.utils.atomic_files import is_url


@dataclass(frozen=True)
class RunStart:
    """State that a run starts from.

    Attributes:
        store: checkpoints of the run.
        source: store with the checkpoint to load: `store`, or the store of the run that this run branches from.
        record: record of that checkpoint; None if the run starts from the beginning.
        changes: differences between the run and the checkpoint.
    """

    store: CheckpointStore
    source: CheckpointStore
    record: Record | None
    changes: CheckpointChanges


class RunBuilder:
    """Builder of a run's components. Its construction opens the data and creates the process groups.

    Construction, `start`, `trainer` and `loop` are collective calls, in this order. They raise UserError if the
    data, a checkpoint or the run folder is invalid. Only `loop` writes to the run folder.

    Args:
        context: settings and environment of the run. The process group has been started.

    Attributes:
        context: settings and environment of the run.
        data: data of the run.
        groups: process groups.
    """

    def __init__(self, context: RunContext) -> None:
        self.context, config = context, context.config
        verified, failed = read_verified(context.folder), read_failed(context.folder)
        self.data = open_data(config.data, config.training.seed, verified, failed)
        for warning in (*self.data.warnings, *skipped_shards.warnings(self.data.damages, self.data.samples)):
            print_on_first_rank(warning)
        self.groups = make_process_groups(config.parallel, config.training.seed)

    # --- starting point ----------------------------------------------------------------------------------------------

    def start(self) -> RunStart:
        """Find and check the state that the run starts from."""
        branch = self.context.branch
        run_identity = identity(self.context.config, self.data)
        continuation = Continuation(self.context.config, run_identity, is_branch=branch is not None)
        store = source = self._store(run_identity, continuation.compare)
        if branch is None:
            record = self._checkpoint_record(store)
        else:
            source = self._trunk_store(branch, continuation.compare)
            record = source.check(branch.step)
        changes = CheckpointChanges()
        if record is not None:
            changes = continuation.compare(record, source.folder.path(record.progress.step))
        store.identity = {**run_identity, CHANGED: [*changes.recorded]}
        return RunStart(store, source, record, changes)

    def _store(self, run_identity: dict[str, Any], check_record: Callable[[Record, Path], object]) -> CheckpointStore:
        """Return the checkpoint store of the run itself."""
        context, training = self.context, self.context.config.training
        return CheckpointStore(
            context.folder / CHECKPOINTS,
            run_identity,
            self.groups,
            context.platform,
            Retention(training.keep_checkpoints, training.keep_every),
            asynchronous=training.async_checkpoints,
            guard=context.lock.check if context.lock is not None else None,
            check_record=check_record,
        )

    def _trunk_store(self, branch: Branch, check_record: Callable[[Record, Path], object]) -> CheckpointStore:
        """Return the checkpoint store of the run that this run branches from."""
        hint, platform = f"give another {FIELD}", self.context.platform
        return CheckpointStore(
            branch.checkpoints.root, {}, self.groups, platform, choose_hint=hint, check_record=check_record
        )

    def _checkpoint_record(self, store: CheckpointStore) -> Record | None:
        """Check the run's own checkpoint to continue from and return its record; None to start without one."""
        step = self.context.step
        if step is None:
            return None
        if self.context.is_exact:
            return store.check(step)
        record, damages = store.check_newest()
        for damage in damages:
            fallback = f"continuing from step {record.progress.step} instead of step {step}"
            print_on_first_rank(f"selectron: warning: {damage.where}: {damage.problem}; {fallback}")
        return record

    # --- model -------------------------------------------------------------------------------------------------------

    @cached_property
    def shape(self) -> ModelShape:
        """Shape of the model."""
        return model_shape(self.context.config, self.context.platform, self.data.vocab_size)

    def trainer(self, start: RunStart) -> Trainer:
        """Build model and optimizer, and load their state."""
        config, branch = self.context.config, self.context.branch
        is_new = start.record is None
        trainer = build_trainer(config, self.shape, self.groups, self.context.platform, initialize=is_new)
        if start.record is not None:
            start.source.load(trainer.optimizer, start.record)
        if branch is not None:
            branch.check_learning_rate(trainer.optimizer.lr, is_allowed=bool(start.changes.recorded))
        return trainer

    # --- loop --------------------------------------------------------------------------------------------------------

    def loop(self, start: RunStart, trainer: Trainer) -> TrainingLoop:
        """Build the training loop and print the header; the first rank creates the files of the run."""
        context, config, platform = self.context, self.context.config, self.context.platform
        progress = self._progress(start.record)
        evaluator = self._evaluator(trainer)
        with trainer.optimizer.gathered_parameters():  # counting requires gathered parameters
            flops, peak = flops_and_peak(config, self.shape, trainer, self.data.samples)
            size = model_size(trainer)
        suites = self._suites(trainer, progress)
        print_on_first_rank(format_header(context, self.data, size, progress, dist.get_world_size()))
        identity_entries = {key: start.store.identity[key] for key in (DATA, CHANGED)}
        records = create_files(context, self.data, progress, {**asdict(size), **identity_entries})
        last_evaluation = sum_over_ranks(0 if records is None else records.last_evaluation, platform)
        token, *_ = gather_objects("" if context.lock is None else context.lock.token)
        last_suites = sum_over_ranks(0 if records is None else records.last_suites, platform)
        rank, resilience = dist.get_rank(), config.resilience
        return TrainingLoop(
            trainer=trainer,
            samples=self.data.samples,
            evaluator=evaluator,
            store=start.store,
            recovery=Recovery(resilience, context.folder, trainer.optimizer, start.store, records),
            stragglers=Stragglers(resilience, config.training.precision, platform, rank, records),
            heartbeat=Heartbeat(context.folder, rank, resilience.heartbeat_seconds, token),
            training=config.training,
            layout=layout_of(config, dist.get_world_size()),
            records=records,
            flops_per_token=flops,
            peak_flops=peak,
            progress=progress,
            last_evaluation=int(last_evaluation),
            packing=packing_from_config(config.data),
            suites=suites,
            last_suites=int(last_suites),
        )

    def _progress(self, record: Record | None) -> Progress:
        """Return the progress to start from. The first rank reads the position in the data from the run folder."""
        progress = Progress() if record is None else record.progress
        if dist.get_rank() == 0:
            progress = resumed_progress(self.context.folder, progress)
        first, *_ = gather_objects(asdict(progress))
        return Progress(**first)

    def _evaluator(self, trainer: Trainer) -> DomainEvaluator:
        data, config = self.data, self.context.config
        domains = evaluation_domains(
            data.root,
            data.manifest,
            data.train_domains,
            data.test_domains,
            config.data.seq_length,
            config.training.evaluation_sequences,
        )
        entry = data.manifest.tokenizer
        source = ClassifierSource(
            root=data.root,
            manifest=data.manifest,
            train_domains=data.train_domains,
            load_tokenizer=partial(load_tokenizer, data.tokenizer_file, entry),
            seq_length=config.data.seq_length,
            device=trainer.platform.device,
            counts_training=not is_url(config.data.path),
        )
        return DomainEvaluator(
            trainer,
            domains,
            config.training.micro_batch_size,
            packing_from_config(config.data),
            class_source=source,
        )

    def _suites(self, trainer: Trainer, progress: Progress) -> SuitesBetweenSteps | None:
        """Return the suites that evaluate the run between steps, or None."""
        options = check_suites(self.context.config)
        if not options:
            return None
        entry = self.data.manifest.tokenizer
        evaluated = EvalContext(
            config=self.context.config,
            name=self.context.folder.name,
            progress=progress,
            tokenizer_sha256=entry.sha256,
            tokenizer=load_tokenizer(self.data.tokenizer_file, entry),
            chunks=trainer.optimizer.chunks,
            groups=trainer.groups,
            platform=trainer.platform,
        )
        return SuitesBetweenSteps(evaluated, trainer.optimizer.evaluation_chunks, options, self.context.folder)
