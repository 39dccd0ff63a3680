"""A stop that is asked for: SIGTERM, SIGINT and SIGUSR1 let the step in hand finish."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

from megatron_ext.signals import handled

AGAIN_SECONDS = 1.0
"""Seconds after which a second Ctrl-C is the user's: a terminal and a program that passes it on send one each."""

_SAID = b"selectron: stopping with a checkpoint after this step; Ctrl-C once more ends at once, without one\n"


class StopRequest:
    """Remembers the signal by which this process was asked to stop. A second Ctrl-C ends it at once.

    Attributes:
        signal_name: e.g. `SIGTERM`; None while nobody has asked.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._interrupted: float | None = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler.

        Raises:
            KeyboardInterrupt: SIGINT came a second time.
        """
        self.signal_name = signal.Signals(number).name
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._interrupted is not None and now - self._interrupted > AGAIN_SECONDS:
            raise KeyboardInterrupt
        if self._interrupted is None:
            self._interrupted = now
            if os.environ.get("RANK", "0") == "0":
                os.write(2, _SAID)  # what Python buffers may be in use at this moment


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """While inside, SIGTERM, SIGINT and SIGUSR1 (which Slurm sends before a job's time is up) are only remembered."""
    request = StopRequest()
    with handled((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1), request):
        yield request
