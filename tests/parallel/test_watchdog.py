"""Watchdog of a process: a hanging process ends and prints its stack, one that makes progress is left alone."""

from __future__ import annotations

import faulthandler
import subprocess
import sys

import pytest

from megatron_ext.parallel.watchdog import STANDARD_ERROR, group_timeout, record_progress, watchdog

HANGS = """
import time
from megatron_ext.parallel.watchdog import watchdog

def stuck_in_a_collective():
    with watchdog(0.5):
        time.sleep(600)

stuck_in_a_collective()
"""


class FakeTimer:
    """Fake of faulthandler's timer, whose clock only the test advances. A new call replaces the previous one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.due = 0.0, float("inf")
        monkeypatch.setattr(faulthandler, "dump_traceback_later", self.start)
        monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", self.cancel)

    def start(self, seconds: float, *, exit: bool, file: int) -> None:
        assert (exit, file) == (True, STANDARD_ERROR)
        self.due = self.now + seconds

    def cancel(self) -> None:
        self.due = float("inf")

    @property
    def has_fired(self) -> bool:
        return self.now >= self.due


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> FakeTimer:
    return FakeTimer(monkeypatch)


def test_watchdog_ends_hanging_process() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Timeout (0:00:00.500000)!\n")
    assert "in stuck_in_a_collective" in done.stderr


def test_watchdog_leaves_a_process_with_progress_alone(timer: FakeTimer) -> None:
    with watchdog(2.0):
        for _ in range(8):
            timer.now += 1.5
            assert not timer.has_fired
            record_progress()
    timer.now += 100.0  # after the watch
    record_progress()
    assert timer.due == float("inf")


def test_watchdog_ends_process_without_progress_calls(timer: FakeTimer) -> None:
    with watchdog(2.0):
        timer.now += 1.5
        assert not timer.has_fired
        timer.now += 0.5
        assert timer.has_fired


def test_watchdog_without_limit(timer: FakeTimer) -> None:
    with watchdog(0.0):
        record_progress()
        assert timer.due == float("inf")


@pytest.mark.parametrize(("watch", "expected"), [(0.0, 600), (10.0, 600), (1800.0, 1860)])
def test_group_timeout_exceeds_watchdog_limit(watch: float, expected: int) -> None:
    assert group_timeout(watch).total_seconds() == expected
