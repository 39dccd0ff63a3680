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
_SECONDS_TO_SHOW = 5.0
"""Maximum seconds to wait for remaining output after the script's exit. Surviving ranks may keep the pipe open."""


def start_here(job: Job, processes: int, lock: int, out: IO[bytes], err: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a job's script in its own session.

    Args:
        job: job whose folder has been written.
        processes: number of processes of the run.
        lock: file descriptor from `claim`. It is passed to the script and closed in this process, so that the lock is
            released when the script exits, however this process ends.
        out: standard output.
        err: standard error.
    """
    with open(lock, "rb") as held:
        return subprocess.Popen(
            ["bash", str(job.script)],
            env=local_environment(processes),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=[held.fileno()],
            start_new_session=True,
        )


def run_here(job: Job, processes: int, lock: int) -> int:
    """Run a job's script to its end, printing its output and appending it to the job's log.

    SIGINT, SIGTERM and SIGUSR1 are forwarded. SIGHUP, from a closed terminal, is forwarded as SIGTERM.

    Args:
        job: written.
        processes: of its run.
        lock: see `claim`.

    Returns:
        The script's exit code, in the shell's convention (128 + n for signal n).
    """
    with _passed_on() as has_begun:
        sys.stdout.flush()
        shown = [_shown_and_kept(job, descriptor) for descriptor in (1, 2)]
        out, err = (tee.stdin for tee in shown)
        assert out is not None
        assert err is not None
        with out, err:
            script = start_here(job, processes, lock, out, err)
        has_begun(script)
        code = script.wait()
        for tee in shown:
            with suppress(subprocess.TimeoutExpired):
                tee.wait(_SECONDS_TO_SHOW)
    return 128 - code if code < 0 else code


def _shown_and_kept(job: Job, descriptor: int) -> subprocess.Popen[bytes]:
    """Start a `tee` process that copies its input to this process's standard output or error and to the job's log.

    It is a process in its own session: the run and its log continue when this process is killed or its terminal closes.
    """
    command = ["tee", "--append", "--output-error=warn-nopipe", str(job.log)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=descriptor, start_new_session=True)


@contextmanager
def _passed_on() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Context manager that forwards signals to a script.

    Yields:
        Function to call with the script once it has started. Earlier signals are forwarded then.
    """
    script: list[subprocess.Popen[bytes]] = []
    waiting: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        if not script:
            waiting.append(number)
        elif number == signal.SIGINT:
            with suppress(ProcessLookupError):  # it has just exited
                os.killpg(script[0].pid, number)  # to the group, like a terminal: a second Ctrl-C kills hanging ranks
        else:
            script[0].send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def has_begun(started: subprocess.Popen[bytes]) -> None:
        script.append(started)
        for number in waiting:
            pass_on(number, None)

    # Ignored signals stay ignored, e.g. SIGHUP under nohup.
    with handle_signals([number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN], pass_on):
        yield has_begun
