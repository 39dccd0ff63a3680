"""Processes that run a function in a fork of a process that has imported torch and Megatron.

They behave like commands of a shell: each has its own process id, signal handlers, standard output and standard error.
A new interpreter would spend seconds on imports.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from pool import start_process

from megatron_ext.cli import main


class ForkedProcess:
    """Running process with those methods of `subprocess.Popen` that the tests use.

    Args:
        function: function of a module, which returns the exit code.
        arguments: of the function, picklable.
        environment: environment variables of the process; None: those of this one.
        stdout: file descriptor for the standard output; None: `self.stdout` reads it.
    """

    def __init__(
        self,
        function: Callable[..., int],
        arguments: Sequence[Any],
        environment: Mapping[str, str] | None = None,
        stdout: int | None = None,
    ) -> None:
        pipes = [os.pipe(), os.pipe()]
        self.stdout, self._stderr = (os.fdopen(read) for read, _ in pipes)
        outputs = [Connection(os.dup(stdout or pipes[0][1]), readable=False), Connection(pipes[1][1], readable=False)]
        child = (function, arguments, dict(os.environ if environment is None else environment), outputs)
        self._process = start_process(_run, *child, daemon=True)
        os.close(pipes[0][1])
        for output in outputs:
            output.close()

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.kill()
        self.wait(timeout=240)
        self.stdout.close()
        self._stderr.close()

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for the number of a signal; None while the process runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Send SIGKILL if the process still runs."""
        self._process.kill()

    def wait(self, timeout: float) -> None:
        """Wait until the process has ended.

        Raises:
            TimeoutError: it still runs.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait until the process has ended. Return the rest of its output and errors, which must fit into the pipes."""
        self.wait(timeout)
        return self.stdout.read(), self._stderr.read()


def _run(
    function: Callable[..., int], arguments: Sequence[Any], environment: dict[str, str], outputs: Sequence[Connection]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), descriptor)
        output.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(function(*arguments))


def command(*arguments: str) -> int:
    """Run `selectron` with arguments as a process of its own does."""
    sys.argv[:] = ["selectron", *arguments]
    return main()
