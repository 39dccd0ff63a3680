"""Implementation of `selectron status --ranks`: progress of each rank, and the ranks that others wait for."""

from __future__ import annotations

import time
from pathlib import Path

from megatron_ext.launch.status import format_age
from megatron_ext.run_folder.heartbeat import describe_stalled_ranks, read_heartbeats
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
    records, now = read_heartbeats(folder, damaged), time.time()
    lock = lock_state(folder / LOCK)
    token = lock.holder.token if lock is not None and lock.holder is not None else ""
    others = [record for record in records if record.start and token and record.start != token]
    records = [record for record in records if record not in others]
    other_messages = [
        f"rank {record.rank} on {record.host} (process {record.pid}) belongs to another start of the run"
        for record in others
    ]
    if not records and not damaged and not others:
        problem = "has no heartbeats: no rank has started training, or resilience.heartbeat_seconds is 0"
        raise UserError(str(folder), problem, "wait for its first steps, or omit --ranks")
    rows = [
        [
            str(record.rank),
            record.host,
            str(record.pid),
            str(record.step),
            str(record.passes),
            f"{format_age(now - record.further)} ago",
            "ended" if record.ended else f"{format_age(now - record.written)} ago",
        ]
        for record in records
    ]
    return [*table(COLUMNS, rows), *describe_stalled_ranks(records, now), *map(printable, [*other_messages, *damaged])]
