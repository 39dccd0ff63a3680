"""Watchdog of a process: a hanging process ends and prints its stack, one that makes progress is left alone."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from megatron_ext.parallel.watchdog import group_timeout

SCRIPT = """
import time
from megatron_ext.parallel.watchdog import record_progress, watchdog

def stuck_in_a_collective():
    time.sleep(600)

with watchdog({seconds}):
    for _ in range(8):
        time.sleep(0.5)
        {call}
time.sleep(3)  # after the watch
print("got here", flush=True)
with watchdog({seconds}):
    stuck_in_a_collective() if {seconds} else None
"""


def run(seconds: float, call: str = "record_progress()") -> tuple[int, str, str, float]:
    start = time.monotonic()
    script = SCRIPT.format(seconds=seconds, call=call)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr, time.monotonic() - start


def test_watchdog_ends_hanging_process() -> None:
    code, out, err, seconds = run(2.0)
    assert (code, out) == (1, "got here\n")
    assert err.startswith("Timeout (0:00:02)!\n")
    assert "in stuck_in_a_collective" in err
    assert seconds < 120


def test_watchdog_ends_process_without_progress_calls() -> None:
    code, out, err, _ = run(2.0, call="pass")
    assert (code, out) == (1, "")
    assert "Timeout" in err


def test_watchdog_without_limit() -> None:
    code, out, err, _ = run(0.0)
    assert (code, out, err) == (0, "got here\n", "")


@pytest.mark.parametrize(("watch", "expected"), [(0.0, 600), (10.0, 600), (1800.0, 1860)])
def test_group_timeout_exceeds_watchdog_limit(watch: float, expected: int) -> None:
    assert group_timeout(watch).total_seconds() == expected
