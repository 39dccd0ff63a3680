"""Lock of a run folder while this process trains the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from megatron_ext.data.failed import FAILED_FOLDER_NAME
from megatron_ext.run_folder.heartbeat import FOLDER as HEARTBEATS
from megatron_ext.run_folder.layout import MLFLOW, TENSORBOARD, WANDB
from megatron_ext.run_folder.lock import FOLDER, LockLost, RunLock, acquire, hold_locks
from megatron_ext.utils.errors import EXIT_USER_ERROR
from megatron_ext.utils.untrusted_paths import path_within

WRITTEN_PATHS = (FOLDER, HEARTBEATS, TENSORBOARD, WANDB, MLFLOW, FAILED_FOLDER_NAME, "launch", "evaluation")
"""Folders and files of a run that libraries write, or in which files are replaced and removed.

Checkpoints may be a link to another disk.
"""


@contextmanager
def hold_run_lock(folder: Path) -> Iterator[RunLock | None]:
    """Context manager that holds the lock of a run on its first rank and does nothing on the others.

    Args:
        folder: run folder.

    Yields:
        The lock, or None on the other ranks.

    Raises:
        UserError: another process trains the run, a link leads out of its folder, or the folder cannot be written.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        yield None
        return
    for name in WRITTEN_PATHS:
        path_within(folder, name, str(folder))
    lock = acquire(folder / FOLDER, str(folder))
    with hold_locks(lock, on_stuck=_exit_at_once):
        yield lock


def _exit_at_once(error: LockLost) -> NoReturn:
    """Exit if the lock is lost and this process is stuck, most often in a collective with ranks that are gone."""
    print(f"selectron: error: {error}", file=sys.stderr, flush=True)
    os._exit(EXIT_USER_ERROR)
