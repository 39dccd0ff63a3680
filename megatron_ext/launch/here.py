"""A job without Slurm: its script as a process of this machine."""

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
from megatron_ext.signals import handled

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_SECONDS_TO_SHOW = 5.0
"""For what the script has printed to be written, once it has ended; ranks that outlive it may go on."""


def start_here(job: Job, processes: int, lock: int, out: IO[bytes], err: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a job's script, in a session of its own.

    Args:
        job: written.
        processes: of its run.
        lock: see `claim`; closed here. It is the script's then, and free when it has ended, however this process ends.
        out: its standard output.
        err: its standard error.
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
    """Run a job's script to its end; what it prints is shown and kept in the job's log.

    SIGINT, SIGTERM and SIGUSR1 are passed on; SIGHUP, of a terminal that is closed, ends it as SIGTERM does.

    Args:
        job: written.
        processes: of its run.
        lock: see `claim`.

    Returns:
        The script's exit code, as a shell says it.
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
    """What writes its input to this process's standard output or error, and to the job's log.

    A process of its own, in a session of its own: the run goes on, and so does its log, when this process is killed or
    its terminal is gone.
    """
    command = ["tee", "--append", "--output-error=warn-nopipe", str(job.log)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=descriptor, start_new_session=True)


@contextmanager
def _passed_on() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Within it signals are passed on to a script.

    Yields:
        To be called with the script when it has been started; signals before are passed on then.
    """
    script: list[subprocess.Popen[bytes]] = []
    waiting: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        if not script:
            waiting.append(number)
        elif number == signal.SIGINT:
            with suppress(ProcessLookupError):  # it ends by itself at this moment
                os.killpg(script[0].pid, number)  # as a terminal does: a second Ctrl-C kills ranks that hang
        else:
            script[0].send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def has_begun(started: subprocess.Popen[bytes]) -> None:
        script.append(started)
        for number in waiting:
            pass_on(number, None)

    # One that is ignored stays so, as SIGHUP does under nohup.
    with handled([number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN], pass_on):
        yield has_begun
