"""Signals are remembered, not obeyed, while a run is inside."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_ext.training.stopping import StopRequest, stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_remembered(number: signal.Signals) -> None:
    with stop_on_signals() as stop:
        assert stop.signal_name is None
        os.kill(os.getpid(), number)
        assert stop.signal_name == number.name


def test_the_handlers_before_come_back_even_after_an_error() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    def fail() -> None:
        with stop_on_signals() as stop:
            assert signal.getsignal(signal.SIGTERM) is stop
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  (raised above)
        fail()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_request_can_be_made_without_a_signal() -> None:
    request = StopRequest()
    request(signal.SIGTERM, None)
    assert request.signal_name == "SIGTERM"
