"""A stop that is asked for: SIGTERM, SIGINT and SIGUSR1 let the step in hand finish."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from megatron_ext.signals import handled


class StopRequest:
    """Remembers the signal by which this process was asked to stop.

    Attributes:
        signal_name: e.g. `SIGTERM`; None while nobody has asked.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        self.signal_name = signal.Signals(number).name


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """While inside, SIGTERM, SIGINT and SIGUSR1 (which Slurm sends before a job's time is up) are only remembered."""
    request = StopRequest()
    with handled((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1), request):
        yield request
