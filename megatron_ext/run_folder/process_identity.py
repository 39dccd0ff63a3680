"""Identity of a process across machines, and a check whether the process still exists.

A pid alone does not identify a process, because it is reused and is local to a machine or container. The start time
distinguishes two processes with the same pid. The boot identifier and the pid namespace identify the machine or
container.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a process.

    Attributes:
        host: name of its machine.
        pids: boot identifier and pid namespace, the scope of `pid`. Empty if the system does not provide them.
        pid: process id.
        started: start time in clock ticks since boot. Empty if the system does not provide it.
        job: Slurm job id. None: not in a Slurm job.
        restarts: earlier restarts of that job.
    """

    host: str
    pids: str
    pid: int
    started: str
    job: str | None = None
    restarts: int = 0

    def __str__(self) -> str:
        """Return the process's description for messages."""
        job = "" if self.job is None else f", job {self.job}" + (f", restart {self.restarts}" if self.restarts else "")
        return f"process {self.pid} on {self.host}{job}"

    def exists(self) -> bool | None:
        """Return whether the process still runs. None: it is on another machine or container, or unknown."""
        if not self.pids or self.pids != _pid_scope():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # exists, but belongs to another user
        stat = _stat_fields(self.pid)
        if not stat or not self.started:
            return None
        return stat[0] not in ("Z", "X") and stat[19] == self.started


def this_process() -> ProcessIdentity:
    """Return the identity of the calling process."""
    stat = _stat_fields(os.getpid())
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    return ProcessIdentity(
        host=socket.gethostname(),
        pids=_pid_scope(),
        pid=os.getpid(),
        started=stat[19] if stat else "",
        job=os.environ.get("SLURM_JOB_ID") or None,
        restarts=int(restarts) if restarts.isdecimal() else 0,
    )


def _pid_scope() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third, the state, or an empty list if they are unreadable."""
    try:
        # The second field is the command in parentheses, which may contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
    return fields if len(fields) > 19 else []
