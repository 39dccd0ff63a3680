"""Lock of a run's folder while this process trains the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from megatron_ext.errors import EXIT_USER_ERROR
from megatron_ext.run_folder.lock import FOLDER, LockLost, RunLock, held, take


@contextmanager
def holding(folder: Path) -> Iterator[RunLock | None]:
    """Hold the lock of a run on its first rank; on the others this does nothing.

    Args:
        folder: of the run.

    Yields:
        The lock; None: this is not the first rank.

    Raises:
        UserError: another process trains the run, or the folder cannot be written.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        yield None
        return
    hint = "wait until it ends, or end it there; or choose another run.name"
    lock = take(folder / FOLDER, str(folder), hint=hint)
    with held(lock, on_stuck=_end_at_once):
        yield lock


def _end_at_once(error: LockLost) -> NoReturn:
    """End a process that is stuck, most often in an exchange with ranks that are gone, once another has its run."""
    print(f"selectron: error: {error}", file=sys.stderr, flush=True)
    os._exit(EXIT_USER_ERROR)
