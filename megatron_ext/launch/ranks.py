"""Implementation of `selectron status --ranks`: progress of each rank, and the ranks that others wait for."""

from __future__ import annotations

import time
from pathlib import Path

from megatron_ext.launch.status import ago
from megatron_ext.run_folder.heartbeat import signs, troubles
from megatron_ext.run_folder.lock import FOLDER as LOCK
from megatron_ext.run_folder.lock_file import lock_state
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.markdown import table
from megatron_ext.utils.printable import printable

COLUMNS = ("rank", "host", "process", "step", "passes", "last progress", "last heartbeat")


def ranks_table(folder: Path) -> list[str]:
    """Return a line for each rank of a run, followed by problems.

    Raises:
        UserError: no rank has written a heartbeat.
    """
    damaged: list[str] = []
    found, now = signs(folder, damaged), time.time()
    lock = lock_state(folder / LOCK)
    token = lock.holder.token if lock is not None and lock.holder is not None else ""
    others = [sign for sign in found if sign.start and token and sign.start != token]
    found = [sign for sign in found if sign not in others]
    of_others = [
        f"rank {one.rank} on {one.host} (process {one.pid}) belongs to another start of the run" for one in others
    ]
    if not found and not damaged and not others:
        problem = "has no heartbeats: no rank has started training, or resilience.heartbeat_seconds is 0"
        raise UserError(str(folder), problem, "wait for its first steps, or omit --ranks")
    rows = [
        [
            str(sign.rank),
            sign.host,
            str(sign.pid),
            str(sign.step),
            str(sign.passes),
            f"{ago(now - sign.further)} ago",
            "ended" if sign.ended else f"{ago(now - sign.written)} ago",
        ]
        for sign in found
    ]
    return [*table(COLUMNS, rows), *troubles(found, now), *map(printable, [*of_others, *damaged])]
