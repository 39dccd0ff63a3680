"""Server that forks the ranks of jobs on virtual nodes, from a process that has imported torch and Megatron.

A rank that Slurm starts would import for four seconds. Instead Slurm starts `rank_stub`. The server forks the rank into
the namespaces of the stub, so the rank is a process of its node and ends when the node's power is cut. Another process,
outside the node, passes the stub's signals on to the rank, and the rank's exit code to the stub.
"""

from __future__ import annotations

import atexit
import ctypes
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import sabotaged
from pool import start_process
from rank_stub import NAMESPACES

from megatron_ext.commands import run_config
from megatron_ext.utils import gc_control

STUB = Path(__file__).with_name("rank_stub.py")
TITLE = "rank "
_NUM_DESCRIPTORS = 3 + len(NAMESPACES)
_ARGUMENTS_START, _ARGUMENTS_END = 45, 46  # indices of fields of /proc/PID/stat after the name
_PR_SET_PDEATHSIG = 1


def program(path: Path, faults: Sequence[str] = ()) -> Path:
    """Write a script to pass as the Python interpreter of a launched run, with faults of `sabotaged`."""
    stub = f"{sys.executable} -I -S {STUB} {_address()}"
    path.write_text(f'#!/bin/sh\nexec {stub} {",".join(faults) or "none"} "$@"\n')
    path.chmod(0o755)
    return path


def ranks_of(folder: Path) -> list[int]:
    """Process ids of a run's ranks on all nodes."""
    found = subprocess.run(
        ["pgrep", "-f", f"^{TITLE}train {folder}/launch"], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in found.stdout.split()]


@cache
def _address() -> str:
    """Path of the socket of this process's server, which the first call starts. It ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="ranks-")  # a short path: that of a socket has at most 107 bytes
    path = f"{folder.name}/socket"
    ours, theirs = Pipe()
    server = start_process(_serve, path, theirs, name="rank server")
    theirs.close()
    ours.recv()  # it listens

    def stop() -> None:
        ours.close()
        server.join()
        folder.cleanup()

    atexit.register(stop)
    return path


def _serve(path: str, parent: Connection) -> None:
    """Fork a rank for each connection, until the parent has ended."""
    gc_control.set_process_owned(True)
    run_config.mixers()
    with gc_control.frozen_imports():
        import megatron_ext.training.run  # noqa: F401  (once for all ranks)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that attend ranks
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(socket.SOMAXCONN)
        parent.send(None)
        while parent not in wait([listener, parent]):
            stub, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                parent.close()
                sys.exit(_run_rank(stub))
            stub.close()


def _run_rank(stub: socket.socket) -> int:
    """Fork a rank and attend it. Return the rank's exit code in the rank; the other process ends here."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, descriptors, _, _ = socket.recv_fds(stub, 4, _NUM_DESCRIPTORS)
    with stub.makefile("rb") as stream:
        arguments, folder, environment = marshal.loads(stream.read(int.from_bytes(head, "big")))
    libc = ctypes.CDLL(None, use_errno=True)
    for descriptor in descriptors[3:]:
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
    rank = os.fork()  # only children enter a namespace of processes
    if rank:
        _attend(stub, rank)
        os._exit(0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    stub.close()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _set_title(TITLE + " ".join(arguments[3:]))
    return sabotaged.run(arguments)


def _attend(stub: socket.socket, rank: int) -> None:
    """Pass signals from the stub to the rank until it has ended, then its exit code to the stub.

    If the stub has been killed, kill the rank.
    """
    end = os.pidfd_open(rank)
    while end not in select.select([stub, end], [], [])[0]:
        for number in stub.recv(64) or [signal.SIGKILL]:
            os.kill(rank, number)
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    with suppress(BrokenPipeError):  # the stub has been killed
        stub.sendall(marshal.dumps(code))


def _set_title(title: str) -> None:
    """Overwrite the command line of this process, by which tests find it."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(stat[_ARGUMENTS_START]), int(stat[_ARGUMENTS_END])
    content = title.encode()[: end - start - 1]
    ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)
