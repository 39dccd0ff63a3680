"""A process that is killed immediately before one of its changes to a folder. The change is chosen by number."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import multiprocess
from multiprocess.connection import Connection

from data_prep.running.execution import PR_SET_PDEATHSIG

CHANGES = {
    "os.rename": 2,
    "os.remove": 1,
    "os.mkdir": 1,
    "os.rmdir": 1,
    "os.truncate": 1,
    "os.link": 2,
    "os.symlink": 2,
}
"""Audit events of calls that change folders, with the number of leading path arguments.

`os.replace` is a rename, `os.unlink` a removal. Opening for writing is recognised by its flags.
"""

KILLED, DONE = 9, 0


def changes(root: Path, number: int | None, work: Callable[[], object]) -> tuple[int, int]:
    """Run `work` in a separate process that is killed immediately before change `number` below `root`.

    The process is forked from a server without threads. A fork of the test process would lack the threads of libraries
    that earlier tests used (the pool of `tokenizers`, for example), and would wait for them forever.

    Args:
        root: folder whose changes count.
        number: number of the change, from 0. None: the process is not killed.
        work: function to run.

    Returns:
        The exit status of the process, KILLED or DONE (1 after an exception), and the number of changes before its end.
    """
    server, connection = _server()
    try:
        connection.send((str(root), number, work))
        return connection.recv()
    except BaseException:  # for example, a test's time limit: leave no process behind
        server.kill()
        server.join()
        _server.cache_clear()
        raise


@cache
def _server() -> tuple[Any, Connection]:
    context = multiprocess.get_context("forkserver")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    theirs.close()
    return server, ours


def _serve(connection: Connection) -> None:
    with suppress(EOFError):  # the test process has ended
        while True:
            connection.send(_fork(*connection.recv()))


def _fork(root: str, number: int | None, work: Callable[[], object]) -> tuple[int, int]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.close(reading)
            watch = _Watch(root, number, writing)
            sys.addaudithook(watch)
            work()
            watch.end(DONE)
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        output = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), int(output or -1)


class _Watch:
    """Audit hook that counts the events of its own process, but not those of child processes."""

    def __init__(self, root: str, number: int | None, pipe: int) -> None:
        self.root, self.number, self.pipe = root, number, pipe
        self.process, self.count = os.getpid(), 0

    def __call__(self, event: str, arguments: tuple) -> None:
        if os.getpid() != self.process or not any(self.is_inside(path) for path in self.changed(event, arguments)):
            return
        if self.count == self.number:
            self.end(KILLED)
        self.count += 1

    def changed(self, event: str, arguments: tuple) -> tuple:
        if event == "open":
            return arguments[:1] if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) else ()
        paths = arguments[: CHANGES.get(event, 0)]
        folder = arguments[-1] if paths and event in ("os.remove", "os.mkdir", "os.rmdir") else -1
        if folder < 0:
            return paths
        return (os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(paths[0])),)  # as shutil.rmtree does

    def is_inside(self, path: object) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(self.root)

    def end(self, code: int) -> None:
        os.write(self.pipe, str(self.count).encode())
        os._exit(code)
