"""Saving and loading a run's state at any layout, through Megatron's dist_checkpointing (torch_dist)."""

from __future__ import annotations

import errno
import os
import queue
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.checkpoint.folder import CheckpointFolder, Progress, Record
from megatron_ext.checkpoint.state import layout_of_generators, model_state, restore, restore_model, run_state
from megatron_ext.errors import UserError
from megatron_ext.optim.base import RunOptimizer
from megatron_ext.platform import Platform

_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EFBIG}
_TORCH_STORAGE_ERRORS = ("iostream error", "file write failed", "inline_container")
"""What torch.save's own streams say, whatever the reason."""

_NEXT_TO_NOTHING = 1 << 16
"""Bytes free on a disk that counts as full."""


class CheckpointStore:
    """Checkpoints of one run.

    Args:
        root: the run's `checkpoints/` folder.
        identity: values of the configuration that whoever continues must share, by dotted field.
        groups: process groups.
        platform: where this runs.
        keep: newest checkpoints kept; 0: all.
    """

    def __init__(
        self,
        root: Path,
        identity: dict[str, Any],
        groups: ProcessGroupCollection,
        platform: Platform,
        keep: int,
    ) -> None:
        self.folder = CheckpointFolder(root)
        self._identity, self._groups, self._platform, self._keep = identity, groups, platform, keep

    def save(self, optimizer: RunOptimizer, progress: Progress) -> Path:
        """Write the state of every rank as `step_N`; a collective call.

        Raises:
            UserError: the disk is full or refuses; the checkpoints before stay as they were.
        """
        step, path = progress.step, self.folder.path(progress.step)
        try:
            if dist.get_rank() == 0:
                self.folder.begin(step)
            dist.barrier()
            with optimizer.whole(), self._platform.optimizer_context():
                state = run_state(optimizer, self._groups, self._platform, loading=False)
                _write(state, self.folder.partial(step))
            dist.barrier()
            if dist.get_rank() == 0:
                self.folder.finish(step, self._record_parts(progress), self._keep)
            dist.barrier()
        except Exception as error:
            full = _is_full(self.folder.root)  # asked before what was written is removed
            problem = os.strerror(errno.ENOSPC) if full else _storage_problem(error)
            if problem is None:
                raise
            self.folder.abandon(step)
            kept = self.folder.steps()
            mend = "make room and start again with --resume" + (f" (from step {kept[-1]})" if kept else "")
            raise UserError(str(path), f"cannot be saved: {problem}", mend) from error
        return path

    def _record_parts(self, progress: Progress) -> dict[str, Any]:
        generators = layout_of_generators(self._groups)
        return {"progress": progress, "identity": self._identity, "generators": generators}

    def check(self, step: int) -> Record:
        """The record of a checkpoint that this run can continue from.

        Raises:
            UserError: it is damaged, or of a run that differs in what must be the same.
        """
        record = self.folder.read_record(step)
        for field, value in self._identity.items():
            if record.identity.get(field) != value:
                raise UserError(
                    field,
                    f"{value!r}, but the checkpoint {self.folder.path(step)} has {record.identity.get(field)!r}",
                    "give the same value to continue it, or another run.name to begin anew",
                )
        return record

    def load(self, optimizer: RunOptimizer, record: Record) -> None:
        """Fill model, optimizer, schedule and generators from a checked checkpoint; a collective call.

        The generators' states are of one layout; at another they are left as they are. Nothing is drawn from them
        in a run without dropout.
        """
        same_layout = record.generators == layout_of_generators(self._groups)
        with optimizer.whole(), self._platform.optimizer_context():
            state = run_state(optimizer, self._groups, self._platform, loading=True, with_generators=same_layout)
            state = dist_checkpointing.load(state, str(self.folder.path(record.progress.step)))
            restore(state, optimizer, self._platform)

    def load_model(self, chunks: Sequence[torch.nn.Module], record: Record) -> None:
        """Fill the model alone from a checked checkpoint, nothing of its optimizer being read; a collective call."""
        with self._platform.optimizer_context():
            state = {"model": model_state(chunks, self._groups)}
            state = dist_checkpointing.load(state, str(self.folder.path(record.progress.step)))
        restore_model(state["model"], chunks)


def _write(state: dict[str, Any], folder: Path) -> None:
    """Megatron's synchronous save, with a failure of any rank's writers known on every rank."""
    _keep_results_in_this_process()
    try:
        dist_checkpointing.save(state, str(folder))
    except CheckpointException as error:  # no Exception; raised on all ranks, and only the first one's says why
        said = [str(error) + (f": {os.strerror(errno.ENOSPC)}" if _is_full(folder) else "")]
        dist.broadcast_object_list(said)
        raise RuntimeError(said[0]) from None


def _keep_results_in_this_process() -> None:
    """Give Megatron's writer a plain queue for its results.

    Its own belongs to a server process, which takes seconds to start, outlives a rank that is killed, and holds the
    rank's output open. Saving here is synchronous: the queue never leaves this process.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def _is_full(folder: Path) -> bool:
    """Whether next to nothing can be written there: what a full disk makes libraries raise often does not say so."""
    try:
        return shutil.disk_usage(folder).free < _NEXT_TO_NOTHING
    except OSError:
        return False


def _storage_problem(error: BaseException | None) -> str | None:
    """What the disk did, from an error or what it came from; None if none of them is the disk's doing."""
    problem = None
    while error is not None:
        # Megatron's writers are processes of their own: what they raise arrives as text.
        for code in _STORAGE_ERRORS:
            if getattr(error, "errno", None) == code or os.strerror(code) in str(error):
                return os.strerror(code)
        if any(text in str(error) for text in _TORCH_STORAGE_ERRORS):
            problem = "the disk refuses; it may be full"  # unless what it came from says more
        error = error.__cause__ or error.__context__
    return problem
