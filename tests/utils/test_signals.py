"""Temporary signal handlers, with signals that this process sends to itself."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_ext.utils.signals import handle_signals


def test_signal_handler_is_temporary() -> None:
    outer: list[int] = []
    inner: list[int] = []
    with handle_signals([signal.SIGUSR1, signal.SIGUSR2], lambda number, _: outer.append(number)):
        with handle_signals([signal.SIGUSR1], lambda number, _: inner.append(number)):
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert (inner, outer) == ([signal.SIGUSR1], [signal.SIGUSR2, signal.SIGUSR1])


def test_signal_handlers_are_restored_after_an_error() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(RuntimeError), handle_signals([signal.SIGUSR1], lambda *_: None):
        raise RuntimeError
    assert signal.getsignal(signal.SIGUSR1) is before
