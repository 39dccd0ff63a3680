"""Graceful stop: on SIGTERM, SIGINT or SIGUSR1 the current step finishes first."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

from megatron_ext.utils.signals import handle_signals

DUPLICATE_SIGINT_SECONDS = 1.0
"""Seconds within which a second SIGINT is ignored. On Ctrl-C, the terminal and the launcher may each send a SIGINT."""

_MESSAGE = b"selectron: stopping with a checkpoint after this step; press Ctrl-C again to exit at once without one\n"


class StopRequest:
    """Record the signal that asked this process to stop. A second Ctrl-C interrupts the process at once.

    Attributes:
        signal_name: name of the signal, e.g. `SIGTERM`; None if no stop was requested.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._interrupted: float | None = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal.

        Raises:
            KeyboardInterrupt: SIGINT arrived a second time.
        """
        self.signal_name = signal.Signals(number).name
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._interrupted is not None and now - self._interrupted > DUPLICATE_SIGINT_SECONDS:
            raise KeyboardInterrupt
        if self._interrupted is None:
            self._interrupted = now
            if os.environ.get("RANK", "0") == "0":
                os.write(2, _MESSAGE)  # unbuffered: the handler may have interrupted a write to Python's buffers


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Context manager that only records SIGTERM, SIGINT and SIGUSR1 (which Slurm sends before the time limit)."""
    request = StopRequest()
    with handle_signals((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1), request):
        yield request
