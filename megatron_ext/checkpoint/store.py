"""Save and load a run's state under any layout, in Megatron's torch_dist format (dist_checkpointing)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import _disable_gc
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.checkpoint.disk import Failure
from megatron_ext.checkpoint.folder import TRAIN_HINT, CheckpointFolder, DamagedCheckpoint, Progress, Record, Retention
from megatron_ext.checkpoint.index import Index
from megatron_ext.checkpoint.plan import Planner, RankPlan
from megatron_ext.checkpoint.reading import load_state
from megatron_ext.checkpoint.saving import AsyncSave, SaveFailed
from megatron_ext.checkpoint.staging import FetchToHost, Staging
from megatron_ext.checkpoint.state import (
    backing_tensors,
    generator_layout,
    model_state,
    plain_state,
    restore,
    restore_model,
    run_state,
)
from megatron_ext.optim.base import RunOptimizer
from megatron_ext.parallel.agreement import from_first_rank, raise_on_all_ranks
from megatron_ext.platform.device import Platform
from megatron_ext.utils.errors import UserError


class CheckpointStore:
    """Checkpoints of one run.

    Args:
        root: the run's `checkpoints/` folder.
        identity: identity of the run, stored in the record of every checkpoint.
        groups: process groups.
        platform: platform of this process.
        retention: rule for which checkpoints are kept.
        asynchronous: True if `save` returns once the state is copied. `advance` and `wait` then complete the save.
        choose_hint: see `CheckpointFolder`.
        guard: function called on the first rank before a written checkpoint is renamed. If it raises, the save fails.
        check_record: function called with a checkpoint's record and folder before the checkpoint is loaded. It raises a
            UserError if the run may not continue from the checkpoint.

    Attributes:
        folder: folder of the checkpoints.
        identity: identity of the run.
    """

    def __init__(
        self,
        root: Path,
        identity: dict[str, Any],
        groups: ProcessGroupCollection,
        platform: Platform,
        retention: Retention | None = None,
        *,
        asynchronous: bool = False,
        choose_hint: str = TRAIN_HINT,
        guard: Callable[[], object] | None = None,
        check_record: Callable[[Record, Path], object] | None = None,
    ) -> None:
        self.folder = CheckpointFolder(root, choose_hint)
        self.identity, self._check_record = identity, check_record
        self._groups, self._platform = groups, platform
        self._retention, self._asynchronous = retention or Retention(), asynchronous
        self._planner, self._staging, self._index = Planner(), Staging(platform), Index()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: AsyncSave | None = None
        self._guard = guard

    # --- saving ------------------------------------------------------------------------------------------------------

    def save(self, optimizer: RunOptimizer, progress: Progress) -> None:
        """Save the state of all ranks as `step_N`. A collective call. A save in progress is completed first.

        Raises:
            UserError: the disk is full or fails. Earlier checkpoints are unchanged.
        """
        self.wait()
        if not self._planner.is_settled:
            self._create_partial(progress.step)
        try:
            plan, fetch_to_host = self._snapshot_state(optimizer, self.folder.partial(progress.step))
        except BaseException:
            self.folder.abandon(progress.step)
            raise
        record_fields = {
            "progress": progress,
            "identity": self.identity,
            "generators": generator_layout(self._groups),
        }
        self._saving = AsyncSave(
            self.folder,
            progress.step,
            plan,
            fetch_to_host,
            self._index,
            record_fields,
            self._retention,
            self._executor,
            self._guard,
        )
        if not self._asynchronous:
            self.wait()

    def check_writable(self) -> None:
        """Call the guard, if there is one. Not a collective call.

        Raises:
            UserError: the guard's error.
        """
        if self._guard is not None:
            self._guard()

    @property
    def is_saving(self) -> bool:
        """True on all ranks while a save is in progress."""
        return self._saving is not None

    @property
    def is_busy(self) -> bool:
        """True while this rank has background work for a save."""
        return self._saving is not None and self._saving.is_busy

    def advance(self) -> None:
        """Continue a save. A collective call, to be made once no rank `is_busy`, with the errors of `save`."""
        if self._saving is not None and self._run_phase(self._saving.advance):
            self._saving = None

    def wait(self) -> None:
        """Complete a save in progress. A collective call, with the errors of `save`."""
        if self._saving is not None:
            self._run_phase(self._saving.wait)
            self._saving = None

    def abandon(self) -> None:
        """Cancel a save in progress and remove its files.

        Not a collective call: each rank calls this independently, when training ends with an error.
        """
        if self._saving is not None:
            self._saving.abandon()
            self._saving = None

    def _create_partial(self, step: int) -> None:
        """Create the partial folder and remove leftovers of killed runs. A collective call.

        Called only for a run's first saves. Later saves find no leftovers, and each rank creates the folder in the
        background.
        """
        failure: Failure | None = None
        if dist.get_rank() == 0:
            try:
                self.folder.create_partial(step)
            except OSError as error:
                failure = Failure.from_error(error, self.folder.root)
        failure_fields = from_first_rank(None if failure is None else asdict(failure))
        if failure_fields is not None:
            raise self._save_error(step, Failure(**failure_fields))

    def _snapshot_state(self, optimizer: RunOptimizer, partial: Path) -> tuple[RankPlan, FetchToHost]:
        """Plan this rank's writes and copy its state, so that training may change it. A collective call."""
        # Planning creates thousands of short-lived objects, which would trigger full garbage collections.
        with optimizer.gathered_parameters(), _disable_gc(), self._platform.optimizer_context():
            slices = list(optimizer.slices())
            backing = backing_tensors(optimizer, slices)
            if self._planner.is_settled:
                plan, tensors = self._planner.reuse(backing, plain_state(optimizer, self._groups, self._platform))
            else:
                state = run_state(optimizer, slices, self._groups, self._platform)
                plan, tensors = self._planner.plan(state, backing, partial)
            return plan, self._staging.copy(tensors)

    def _run_phase(self, phase: Callable[[], bool | None]) -> bool | None:
        """Call a method of the save in progress and raise a failed save as the error for the user."""
        assert self._saving is not None
        try:
            return phase()
        except SaveFailed as error:
            step, self._saving = self._saving.step, None
            raise self._save_error(step, error.failure) from error

    def _save_error(self, step: int, failure: Failure) -> Exception:
        if failure.problem is None:
            return RuntimeError(f"the checkpoint of step {step} could not be saved\n{failure.trace}")
        steps = self.folder.steps()
        option = f"--resume (from step {steps[-1]})" if steps else "--resume=auto"
        hint = failure.hint or f"free disk space and start again with {option}"
        return UserError(str(self.folder.path(step)), f"cannot be saved: {failure.problem}", hint)

    # --- loading -----------------------------------------------------------------------------------------------------

    def check(self, step: int) -> Record:
        """Return the record of a checkpoint after verifying all its files.

        A collective call. The files are distributed over the ranks.

        Raises:
            DamagedCheckpoint: the checkpoint is missing or damaged.
            UserError: `check_record` refuses the checkpoint.
        """
        records: list[Record] = []
        raise_on_all_ranks(lambda: records.append(self.folder.read_record(step)))
        (record,) = records
        if self._check_record is not None:
            self._check_record(record, self.folder.path(step))
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

        def check_own_files() -> None:
            for name, digest in list(record.files.items())[rank::size]:
                self.folder.check_file(step, name, digest)

        raise_on_all_ranks(check_own_files)
        return record

    def check_newest(self) -> tuple[Record, list[DamagedCheckpoint]]:
        """Find the newest intact checkpoint. A collective call.

        Returns:
            The record of that checkpoint, and the errors of the newer, damaged checkpoints.

        Raises:
            UserError: all checkpoints are damaged, or `check_record` refuses a checkpoint.
        """
        newest = self.folder.latest()
        damages: list[DamagedCheckpoint] = []
        steps = [] if newest is None else [newest, *(step for step in self.folder.steps()[::-1] if step < newest)]
        for step in steps:
            try:
                return self.check(step), damages
            except DamagedCheckpoint as damage:
                damages.append(damage)
        details = "; ".join(f"{damage.where} {damage.problem}" for damage in damages)
        problem = "contains no complete checkpoint" + (f": {details}" if details else "")
        hint = "restore one from a backup, or choose another run.name to start a new run"
        raise UserError(str(self.folder.root), problem, hint)

    def load(self, optimizer: RunOptimizer, record: Record) -> None:
        """Load model, optimizer, schedule and random generators from a checked checkpoint. A collective call.

        The states of the random generators are only valid for the layout under which they were saved. Under another
        layout they are not restored. This only affects runs with dropout, because other runs draw no random numbers.
        """
        same_layout = record.generators == generator_layout(self._groups)
        with optimizer.gathered_parameters(), self._platform.optimizer_context():
            optimizer.make_moments()
            slices = list(optimizer.slices())
            state = run_state(optimizer, slices, self._groups, self._platform, include_generators=same_layout)
            state = load_state(state, self.folder.path(record.progress.step))
            restore(state, optimizer, slices, self._platform)

    def load_model(self, chunks: Sequence[torch.nn.Module], record: Record) -> None:
        """Load only the model from a checked checkpoint, without its optimizer. A collective call."""
        with self._platform.optimizer_context():
            state = {"model": model_state(chunks, self._groups)}
            state = load_state(state, self.folder.path(record.progress.step))
        restore_model(state["model"], chunks)
