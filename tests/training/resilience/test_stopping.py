"""Signals inside the context manager are recorded and do not end the process."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_ext.training.resilience import stopping
from megatron_ext.training.resilience.stopping import StopRequest, stop_on_signals


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


def test_a_second_interrupt_ends_the_process_at_once(
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
    said = capfd.readouterr().err
    assert said == "selectron: stopping with a checkpoint after this step; Ctrl-C once more ends at once, without one\n"


def test_one_rank_says_that_a_run_stops(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    with stop_on_signals():
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == ""
