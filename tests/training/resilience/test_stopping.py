"""Signals inside the context manager are recorded and do not end the process."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_ext.training.resilience import stopping
from megatron_ext.training.resilience.stopping import StopRequest, stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_is_recorded(number: signal.Signals) -> None:
    with stop_on_signals() as stop:
        assert stop.signal_name is None
        os.kill(os.getpid(), number)
        assert stop.signal_name == number.name


def test_previous_handlers_are_restored_after_an_error() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    def fail() -> None:
        with stop_on_signals() as stop:
            assert signal.getsignal(signal.SIGTERM) is stop
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  (raised above)
        fail()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_stop_request_without_a_signal() -> None:
    request = StopRequest()
    request(signal.SIGTERM, None)
    assert request.signal_name == "SIGTERM"


def test_second_interrupt_ends_the_process_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    monkeypatch.delenv("RANK", raising=False)
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # a parent may forward it, too
        assert stop.signal_name == "SIGINT"
        now[0] += 2
        os.kill(os.getpid(), signal.SIGTERM)  # schedulers repeat SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    errors = capfd.readouterr().err
    assert (
        errors
        == "selectron: stopping with a checkpoint after this step; press Ctrl-C again to exit at once without one\n"
    )


def test_one_rank_prints_that_the_run_stops(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    with stop_on_signals():
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == ""
