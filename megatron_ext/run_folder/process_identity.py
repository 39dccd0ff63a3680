"""Identity of a process across machines, and whether the process still exists.

A pid alone does not identify a process: it is reused, and other machines and containers count their own. The start
time tells two processes of one pid apart; the boot identifier and the pid namespace say whose pids they are.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessIdentity:
    """A process.

    Attributes:
        host: name of its machine.
        pids: whose pids `pid` is of: boot identifier and pid namespace; empty where the system does not say.
        pid: its number there.
        started: its start, in clock ticks since the machine was booted; empty where the system does not say.
        job: number of its Slurm job; None: it is in none.
        restarts: of that job until then.
    """

    host: str
    pids: str
    pid: int
    started: str
    job: str | None = None
    restarts: int = 0

    def __str__(self) -> str:
        """As a message names it."""
        job = "" if self.job is None else f", job {self.job}" + (f", restart {self.restarts}" if self.restarts else "")
        return f"process {self.pid} on {self.host}{job}"

    def exists(self) -> bool | None:
        """Whether it still runs; None: it is of another machine or container, or the system does not say."""
        if not self.pids or self.pids != _pids():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        stat = _stat(self.pid)
        if not stat or not self.started:
            return None
        return stat[0] not in ("Z", "X") and stat[19] == self.started


def this_process() -> ProcessIdentity:
    """The identity of the calling process."""
    stat = _stat(os.getpid())
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    return ProcessIdentity(
        host=socket.gethostname(),
        pids=_pids(),
        pid=os.getpid(),
        started=stat[19] if stat else "",
        job=os.environ.get("SLURM_JOB_ID") or None,
        restarts=int(restarts) if restarts.isdecimal() else 0,
    )


def _pids() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third, the state, on; empty where they cannot be read."""
    try:
        # The second one is the command in brackets and may hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
    return fields if len(fields) > 19 else []
