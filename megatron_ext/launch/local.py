"""Start and termination of the processes of a run on this machine."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from megatron_ext.utils.error_reporting import ERROR_FILE, print_user_error
from megatron_ext.utils.errors import EXIT_STOPPED, EXIT_USER_ERROR
from megatron_ext.utils.signals import handle_signals
from megatron_ext.utils.temp_dirs import keep_folder, scratch_folder

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_POLL_SECONDS = 0.05
_TAIL_LINES = 30
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Waiting times of the launcher after a process has failed.

    Attributes:
        to_terminate: seconds until SIGTERM, in which other processes may exit by themselves, e.g. with the same error.
        to_kill: seconds from SIGTERM to SIGKILL. A remaining process may hang in a collective forever.
    """

    to_terminate: float = 5.0
    to_kill: float = 15.0


def rank_command(subcommand: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line of one rank: this `selectron VERB` again."""
    return [sys.executable, "-m", "megatron_ext.cli", subcommand, *arguments]


def launch(command: Sequence[str], processes: int, timeouts: Timeouts | None = None) -> int:
    """Run copies of a command as the ranks of one run and wait for all of them.

    Rank 0 writes to this process's standard output and error. The other ranks write to log files. If such a rank is the
    first to crash, the end of its log is printed. The first SIGTERM, SIGINT and SIGUSR1 are forwarded to every rank. A
    second SIGINT kills the ranks.

    Args:
        command: command that each rank executes.
        processes: number of ranks.
        timeouts: waiting times after a failure.

    Returns:
        0 if all ranks returned 0. 75 if the run was stopped: some ranks returned 75 and the others 0. 2 if a rank ended
        with a user error, which is printed once. Else the exit code of the rank that failed first; if a signal ended
        this rank, 128 plus the number of the signal.
    """
    with scratch_folder("ranks") as folder:
        group = _Group(command, processes, folder, timeouts or Timeouts())
        group.start()  # not covered by `handle_signals`: until all have started, a signal ends the launcher
        with handle_signals((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1), group.forward):
            group.wait()
        code, keep_logs = _report_outcome(group, folder)
        if keep_logs:
            keep_folder(folder)
        return code


def rank_environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return the variables that make a process one rank of a local run, as torchrun would set them.

    All servers listen on the loopback interface only, because anyone who can connect to them can execute code.

    Args:
        rank: global rank.
        processes: number of ranks.
        port: port of the launcher's store, see `rendezvous_store`.
    """
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The launcher serves the store, as under torchrun. If rank 0 served it, another process could take the port
        # before rank 0 opens it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
    }


@contextmanager
def single_rank_environment() -> Iterator[None]:
    """Context manager that makes this process the only rank of a run, and restores the environment afterwards.

    If the environment were not restored, child processes that this process starts later would inherit the variables. A
    rank of a Slurm job that inherits TORCHELASTIC_USE_AGENT_STORE waits for a store that nobody serves.
    """
    store = rendezvous_store()  # served while the object exists
    variables = rank_environment(0, 1, store.port)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        del store


def rendezvous_store() -> TCPStore:
    """Return a store on a free port of the loopback interface, served by this process while the object exists.

    By default the store would listen on all interfaces, without authentication.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(socket.SOMAXCONN)
        port, descriptor = listener.getsockname()[1], listener.detach()  # the store closes it
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


@dataclass
class _Group:
    """The ranks of a run, from start to exit."""

    command: Sequence[str]
    size: int
    folder: Path
    timeouts: Timeouts
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    """Ranks that failed by themselves (exit code other than 0 and 75), in the order of their exit."""
    forwarded: list[signal.Signals] = field(default_factory=list)
    store: TCPStore | None = None

    def start(self) -> None:
        """Start all ranks. If a rank cannot be started, kill those that have started."""
        self.store = rendezvous_store()
        prepare = _kill_on_parent_exit(os.getpid())
        try:
            for rank in range(self.size):
                environment = os.environ | rank_environment(rank, self.size, self.store.port)
                environment[ERROR_FILE] = str(self.folder / "error")
                self.children.append(self._start_rank(rank, environment, prepare))
        except BaseException:
            self._signal(signal.SIGKILL)
            raise

    def _start_rank(
        self, rank: int, environment: dict[str, str], prepare: Callable[[], None]
    ) -> subprocess.Popen[bytes]:
        log: IO[bytes] | None = self.log_of(rank).open("wb") if rank else None
        try:
            # Each rank has its own session. In a terminal, Ctrl-C reaches every process of the foreground group, and a
            # rank in this group would get the signal twice, from the terminal and from the launcher.
            return subprocess.Popen(
                list(self.command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=prepare,
            )
        finally:
            if log is not None:
                log.close()

    def log_of(self, rank: int) -> Path:
        """Return the file that holds the output of a rank other than 0."""
        return self.folder / f"rank_{rank}.log"

    def wait(self) -> None:
        """Wait for all ranks. After a failure, terminate and then kill the others."""
        if not self._wait_until(self._any_failed):
            return
        if not self._wait_until(self._all_ended, self.timeouts.to_terminate):
            self._signal(signal.SIGTERM)
            if not self._wait_until(self._all_ended, self.timeouts.to_kill):
                self._signal(signal.SIGKILL)
        self._wait_until(self._all_ended)

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Forward the first signal of each kind to the ranks, and kill the ranks at the second SIGINT."""
        received = signal.Signals(number)
        is_repeated = received in self.forwarded
        self.forwarded.append(received)
        if not is_repeated:
            self._signal(received)
        elif received == signal.SIGINT:
            self._signal(signal.SIGKILL)

    def _any_failed(self) -> bool:
        return bool(self.failed)

    def _all_ended(self) -> bool:
        return all(child.poll() is not None for child in self.children)

    def _wait_until(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Poll until the condition holds, `seconds` have passed or all ranks have ended. Return whether it holds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            all_ended = self._all_ended()
            self._note_failures()
            if condition() or all_ended or (deadline is not None and time.monotonic() > deadline):
                return condition()
            time.sleep(_POLL_SECONDS)

    def _note_failures(self) -> None:
        for rank, child in enumerate(self.children):
            if child.poll() not in (None, 0, EXIT_STOPPED) and rank not in self.failed:
                self.failed.append(rank)

    def _signal(self, number: signal.Signals) -> None:
        for child in self.children:
            child.send_signal(number)  # no effect on a child that has ended


def _report_outcome(group: _Group, folder: Path) -> tuple[int, bool]:
    """Report errors to the user. Return the exit code, and True if the logs contain more than was printed."""
    codes = [child.returncode for child in group.children]
    error = folder / "error"
    if error.exists():
        print_user_error(error.read_text(encoding="utf-8"))
        return EXIT_USER_ERROR, False
    if not group.failed:
        return EXIT_STOPPED if EXIT_STOPPED in codes else 0, False
    first = group.failed[0]
    code = _exit_code(codes[first])
    if EXIT_USER_ERROR in codes:
        code = EXIT_USER_ERROR
    if code in (128 + number for number in group.forwarded):
        return code, False  # the sender of the signal expects this
    return code, _print_crash(group, first, codes[first])


def _print_crash(group: _Group, rank: int, code: int) -> bool:
    """Print how a rank failed. Return True if the rank has a log, which contains more."""
    outcome = f"was terminated by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    print(f"selectron: rank {rank} of {group.size} {outcome}", file=sys.stderr)
    if rank == 0:
        return False  # its output was already printed
    log = group.log_of(rank)
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]:
        print(f"[rank {rank}] {line}", file=sys.stderr)
    print(f"selectron: full output of rank {rank}: {log}", file=sys.stderr)
    return True


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _kill_on_parent_exit(parent: int) -> Callable[[], None]:
    """Return a function to run in the child before exec: on Linux, the child is then killed when the launcher dies."""
    if sys.platform != "linux":
        return lambda: None
    libc = ctypes.CDLL(None)  # loaded here, to do as little as possible between fork and exec

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the launcher died before the line above
            os._exit(128 + signal.SIGKILL)

    return prepare
