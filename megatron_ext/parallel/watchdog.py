"""A rank that gets no further ends itself and says where it was: a silent hang becomes an exit.

A rank that is stopped, or a link that is cut without a word, leaves all others in a collective. They would wait until
the group's own time-out, and those outside a collective for ever. Each rank watches itself: no other need be there for
that. The watch is Python's faulthandler: a thread in C, which needs neither the interpreter's lock nor a signal.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager

STANDARD_ERROR = 2
"""The descriptor: what Python has made of `sys.stderr` does not matter when a process ends."""

_seconds = 0.0


@contextmanager
def watching(seconds: float) -> Iterator[None]:
    """Within it this process ends with exit code 1, and its stacks on standard error, when it gets no further.

    Args:
        seconds: from one `alive` to the next at most; 0: nothing is watched.
    """
    global _seconds
    _seconds = seconds
    alive()
    try:
        yield
    finally:
        _seconds = 0.0
        faulthandler.cancel_dump_traceback_later()


def alive() -> None:
    """Say that this process has got further: every forward pass does, and what lies between two has the same limit."""
    if _seconds:
        faulthandler.dump_traceback_later(_seconds, exit=True, file=STANDARD_ERROR)
