"""A rank that gets no further ends itself and says where it was: a silent hang becomes an exit.

A rank that is stopped, or a link that is cut without a word, leaves all others in a collective. They would wait until
the group's own time-out, and those outside a collective for ever. Each rank watches itself: no other need be there for
that. The watch is Python's faulthandler: a thread in C, which needs neither the interpreter's lock nor a signal.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from megatron_ext.heartbeat import Heartbeat

STANDARD_ERROR = 2
"""The descriptor: what Python has made of `sys.stderr` does not matter when a process ends."""

GROUP_TIMEOUT = timedelta(minutes=10)
"""A collective's, where nothing is watched."""

_seconds = 0.0
_heartbeat: Heartbeat | None = None


def group_timeout(seconds: float) -> timedelta:
    """Time-out of the collectives of ranks with a watch: later than it, as NCCL's own ends a rank without its stacks.

    Args:
        seconds: as for `watching`.
    """
    return max(GROUP_TIMEOUT, timedelta(seconds=seconds, minutes=1)) if seconds else GROUP_TIMEOUT


@contextmanager
def watching(seconds: float, heartbeat: Heartbeat | None = None) -> Iterator[None]:
    """Within it this process ends with exit code 1, and its stacks on standard error, when it gets no further.

    Args:
        seconds: from one `alive` to the next at most; 0: nothing is watched.
        heartbeat: writes down that it gets further.
    """
    global _seconds, _heartbeat
    _seconds, _heartbeat = seconds, heartbeat
    alive()
    try:
        yield
    finally:
        _seconds, _heartbeat = 0.0, None
        faulthandler.cancel_dump_traceback_later()


def alive() -> None:
    """Say that this process has got further: every forward pass does, and what lies between two has the same limit."""
    if _heartbeat is not None:
        _heartbeat.beat()
    if _seconds:
        faulthandler.dump_traceback_later(_seconds, exit=True, file=STANDARD_ERROR)
