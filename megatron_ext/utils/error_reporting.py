"""Printing of a user error once, however many ranks find it.

Every rank that finds the error tries to create the same file. The rank that succeeds reports the error. Under
`launch.local`, the environment names the file, and the parent process prints the file's text. Under torchrun or Slurm
there is no such parent, and the rank that created the file prints the error.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from megatron_ext.utils.atomic_files import os_error_reason
from megatron_ext.utils.errors import EXIT_STOPPED, UserError
from megatron_ext.utils.temp_dirs import user_folder

ERROR_FILE = "SELECTRON_ERROR_FILE"
"""Environment variable: file to which a rank writes the user error for the launcher."""

STOPPED_FILE = "SELECTRON_STOPPED_FILE"
"""Environment variable: file that the first rank creates to signal to a batch script that the run was stopped."""

_MAX_AGE_SECONDS = 86400
"""Age in seconds after which a job's error file is removed."""


def report_user_error(message: str) -> None:
    """Report a user error once for all ranks of this machine.

    Args:
        message: one line.
    """
    file_name = os.environ.get(ERROR_FILE)
    is_only_rank = not file_name and not has_peers()
    try:
        is_first = is_only_rank or create_once(Path(file_name) if file_name else _shared_file(), message)
    except OSError:
        file_name, is_first = None, True  # printing the error twice is better than not at all
    if is_first and not file_name:
        print_user_error(message)


def stop_exit_code() -> int:
    """Return the exit code of a rank whose run was asked to stop.

    srun kills all tasks at the first non-zero code, while they are still shutting down. Therefore a batch script gives
    a file in the environment. The first rank creates the file, and all ranks return 0.
    """
    file_name = os.environ.get(STOPPED_FILE)
    if not file_name:
        return EXIT_STOPPED
    if int(os.environ.get("RANK", "0")) == 0:
        try:
            Path(file_name).touch()
        except OSError:  # being killed early is better than a stopped run that looks finished
            return EXIT_STOPPED
    return 0


def disk_error(error: Exception) -> UserError | None:
    """Return a user error if an error means that a disk is full or read-only, else None."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return None
    problem = f"cannot be written ({os_error_reason(error)})"
    return UserError(str(error.filename or "a file"), problem, "free disk space, or choose another location")


def has_peers() -> bool:
    """Return True if this process is one rank of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_reported_by_other_rank() -> bool:
    """Return True if a rank has already reported a user error; a crash of this rank is then its consequence."""
    if not has_peers():
        return False
    file_name = os.environ.get(ERROR_FILE)
    try:
        return (Path(file_name) if file_name else _shared_file()).exists()
    except OSError:
        return False


def print_user_error(message: str) -> None:
    """Print a user error to standard error, on one line."""
    print(f"selectron: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def create_once(path: Path, message: str) -> bool:
    """Create a file with a message if it does not exist.

    Args:
        path: path of the file, the same for all ranks.
        message: text of the file.

    Returns:
        True if this call created the file, False if another process had created it before.

    Raises:
        OSError: the folder cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(message)
    except FileExistsError:
        return False
    return True


def _shared_file() -> Path:
    """Return a file name shared by the ranks of this job on this machine, but by no other job."""
    parent = os.getppid()
    variables = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_STEP_ID")
    # The ranks of a machine are children of one torchrun (or Slurm step). The parent's start time is part of the name,
    # because its pid may be reused while the file still exists. The file cannot be removed at the end, since it is
    # unknown when the last rank has read it.
    key = [*(os.environ.get(name, "") for name in variables), str(os.getuid()), str(parent), _start_time(parent)]
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:20]
    folder = user_folder()
    for old in folder.glob("error-*"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > _MAX_AGE_SECONDS:
                old.unlink()
    return folder / f"error-{digest}"


def _start_time(pid: int) -> str:
    try:
        # Field 22. The second field is the command in parentheses and may contain spaces.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
