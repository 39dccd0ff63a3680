"""Execution of a job's script as a local process, without Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO

from megatron_ext.launch.job import Job, local_environment
from megatron_ext.utils.signals import handle_signals

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_OUTPUT_SECONDS = 60.0
"""Maximum seconds to wait for remaining output after the script's exit. Surviving ranks may keep the pipe open.

On a busy machine or a slow disk, copying the output may take several seconds.
"""


def start_script(job: Job, processes: int, lock: int, out: IO[bytes], err: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a job's script in its own session.

    Args:
        job: job whose folder has been written.
        processes: number of processes of the run.
        lock: file descriptor from `acquire_local_lock`. It is passed to the script and closed in this process, so that
            the lock is released when the script exits, however this process ends.
        out: standard output.
        err: standard error.
    """
    with open(lock, "rb") as lock_file:
        return subprocess.Popen(
            ["bash", str(job.script)],
            env=local_environment(processes),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=[lock_file.fileno()],
            start_new_session=True,
        )


def run_script(job: Job, processes: int, lock: int) -> int:
    """Run a job's script to its end, printing its output and appending it to the job's log.

    SIGINT, SIGTERM and SIGUSR1 are forwarded. SIGHUP, from a closed terminal, is forwarded as SIGTERM.

    Args:
        job: job whose folder has been written.
        processes: number of processes of the run.
        lock: file descriptor from `acquire_local_lock`.

    Returns:
        The script's exit code, in the shell's convention (128 + n for signal n).
    """
    with _forward_signals() as set_script:
        sys.stdout.flush()
        tees = [_start_tee(job, descriptor) for descriptor in (1, 2)]
        out, err = (tee.stdin for tee in tees)
        assert out is not None
        assert err is not None
        with out, err:
            script = start_script(job, processes, lock, out, err)
        set_script(script)
        code = script.wait()
        for tee in tees:
            with suppress(subprocess.TimeoutExpired):
                tee.wait(_OUTPUT_SECONDS)
    return 128 - code if code < 0 else code


def _start_tee(job: Job, descriptor: int) -> subprocess.Popen[bytes]:
    """Start a `tee` process that copies its input to this process's standard output or error and to the job's log.

    It is a process in its own session: the run and its log continue when this process is killed or its terminal closes.
    """
    command = ["tee", "--append", "--output-error=warn-nopipe", str(job.log)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=descriptor, start_new_session=True)


@contextmanager
def _forward_signals() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Context manager that forwards signals to a script.

    Yields:
        Function to call with the script once it has started. Earlier signals are forwarded then.
    """
    script: list[subprocess.Popen[bytes]] = []
    pending: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        if not script:
            pending.append(number)
        elif number == signal.SIGINT:
            with suppress(ProcessLookupError):  # it has just exited
                os.killpg(script[0].pid, number)  # to the group, like a terminal: a second Ctrl-C kills hanging ranks
        else:
            script[0].send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def set_script(started: subprocess.Popen[bytes]) -> None:
        script.append(started)
        for number in pending:
            forward(number, None)

    # Ignored signals stay ignored, e.g. SIGHUP under nohup.
    with handle_signals([number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN], forward):
        yield set_script
