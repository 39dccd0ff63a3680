"""Temporary signal handlers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handle_signals(signals: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Context manager that installs a handler for signals and restores the previous ones at the end.

    Raises:
        ValueError: there are signals, and this is not the main thread.
    """
    previous = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)
