"""Measurement of a command with all its descendants: `python -m megatron_ext.bench.supervise CMD ...`.

Processes of a pool may outlive the parent that would wait for them. Here every one is reaped by this process.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

PR_SET_CHILD_SUBREAPER = 36
"""From Linux's <sys/prctl.h>."""


@dataclass(frozen=True)
class Cost:
    """Cost of a command and all processes that it started.

    Attributes:
        code: exit status of the command.
        seconds: from its start to the exit of the last process.
        cpu_seconds: of all processes, in user and system mode.
        peak_bytes: peak resident memory of the largest process.
    """

    code: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def supervise(command: list[str]) -> Cost:
    """Run a command and return its cost. Every child of this process counts as part of it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    started, code, cpu_seconds, peak = time.perf_counter(), 0, 0.0, 0
    child = subprocess.Popen(command, stdout=sys.stderr)
    while True:
        try:
            pid, status, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return Cost(code, time.perf_counter() - started, cpu_seconds, peak)
        cpu_seconds += usage.ru_utime + usage.ru_stime
        peak = max(peak, usage.ru_maxrss << 10)
        if pid == child.pid:
            code = child.returncode = os.waitstatus_to_exitcode(status)


def measure_command(command: list[str], environment: dict[str, str]) -> tuple[Cost, str]:
    """Run a command under `supervise` in a separate process, and return its cost and output.

    Args:
        command: program and arguments.
        environment: added to the environment of this process.

    Raises:
        RuntimeError: the command failed.
    """
    supervised = [sys.executable, "-m", "megatron_ext.bench.supervise", *command]
    process = subprocess.run(supervised, env=os.environ | environment, capture_output=True, text=True, check=False)
    cost = Cost(**json.loads(process.stdout)) if process.returncode == 0 else None
    if cost is None or cost.code:
        raise RuntimeError(f"{' '.join(command)} failed:\n{process.stderr}")
    return cost, process.stderr


if __name__ == "__main__":
    print(json.dumps(asdict(supervise(sys.argv[1:]))))
