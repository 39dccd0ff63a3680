"""Watchdog that ends a rank without progress and prints its stacks, so that a silent hang becomes an exit.

If a rank is stopped or a network link drops silently, all other ranks wait in a collective until the time-out of its
group. A rank that hangs outside a collective would wait forever. Each rank watches itself, so that no other process is
needed. The watchdog is Python's faulthandler: a C thread that needs neither the GIL nor a signal.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from megatron_ext.run_folder.heartbeat import Heartbeat

STANDARD_ERROR = 2
"""File descriptor of standard error, used instead of `sys.stderr`, which may be replaced or closed."""

GROUP_TIMEOUT = timedelta(minutes=10)
"""Time-out of collectives without a watchdog."""

_seconds = 0.0
_heartbeat: Heartbeat | None = None


def group_timeout(seconds: float) -> timedelta:
    """Return the time-out of collectives under a watchdog.

    The time-out is longer than the watchdog's limit, because NCCL's time-out ends a rank without printing stacks.

    Args:
        seconds: limit of the watchdog, as in `watchdog`.
    """
    return max(GROUP_TIMEOUT, timedelta(seconds=seconds, minutes=1)) if seconds else GROUP_TIMEOUT


@contextmanager
def watchdog(seconds: float, heartbeat: Heartbeat | None = None) -> Iterator[None]:
    """Context manager under which this process ends with exit code 1 and prints its stacks if it makes no progress.

    Args:
        seconds: maximum number of seconds between two calls of `record_progress`; 0: no watchdog.
        heartbeat: receives a beat at each call of `record_progress`.
    """
    global _seconds, _heartbeat
    _seconds, _heartbeat = seconds, heartbeat
    record_progress()
    try:
        yield
    finally:
        _seconds, _heartbeat = 0.0, None
        faulthandler.cancel_dump_traceback_later()


def record_progress() -> None:
    """Record progress of this process and restart the watchdog. Every forward pass calls this."""
    if _heartbeat is not None:
        _heartbeat.beat()
    if _seconds:
        faulthandler.dump_traceback_later(_seconds, exit=True, file=STANDARD_ERROR)
