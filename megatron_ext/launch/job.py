"""Folder of a launched job: batch script, and copies of configuration and code as of the launch."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.config.save import private_yaml, to_yaml
from megatron_ext.config.schema import RunConfig
from megatron_ext.launch import slurm
from megatron_ext.launch.resources import Resources
from megatron_ext.run_folder.launch_events import EVENTS, LAUNCH, launch_folders
from megatron_ext.run_folder.layout import CONFIG
from megatron_ext.run_folder.lock import acquire, hold_locks
from megatron_ext.utils import git_info
from megatron_ext.utils.atomic_files import open_regular, os_error_reason, read_regular, write_atomically, write_private
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.untrusted_paths import check_text

TEMPLATE = Path(__file__).with_name("train.sbatch")
PACKAGES = ("megatron_ext", "kernels", "data_prep")
SCRIPT, CODE, NUMBER = "job.sbatch", "code", "job_id"
SUBMISSION = "submission"
"""Lock of a run while a call submits one of its jobs."""
PRIVATE = "private.yaml"
"""File with the address of the data if the address contains credentials, which config.yaml omits. Only the owner can
read it."""

_NUMBER = re.compile(r"[0-9]{1,12}(_[0-9]{1,12})?")
_NUMBER_HINT = "write the job number of squeue into it, or remove it if the job has ended"
_LOCK_RETRY_SECONDS = 0.05
_BEGIN, _END = "# >>> job\n", "# <<< job\n"


@dataclass(frozen=True)
class Job:
    """Launched job of a run.

    Attributes:
        folder: RUN/launch/N.
    """

    folder: Path

    @property
    def number(self) -> str | None:
        """Slurm's job number; None if the job was not submitted or runs without Slurm.

        Raises:
            UserError: the file with the number is damaged.
        """
        path = self.folder / NUMBER
        try:
            number = read_regular(path, 1 << 16).decode("ascii", "replace").strip() if path.exists() else None
        except OSError as error:
            raise UserError(str(path), f"cannot be read ({os_error_reason(error)})", _NUMBER_HINT) from error
        if number is not None and not _NUMBER.fullmatch(number):
            raise UserError(str(path), f"{number[:40]!r} is not a Slurm job number", _NUMBER_HINT)
        return number  # validated, because it becomes a command argument and part of a file name

    @property
    def is_started(self) -> bool:
        """True if the job was submitted or has started on this machine. The job of a dry run, for example, has not."""
        return (self.folder / NUMBER).exists() or (self.folder / EVENTS).exists()

    @property
    def run(self) -> Path:
        """Run folder."""
        return self.folder.parents[1]

    @property
    def script(self) -> Path:
        """Batch script."""
        return self.folder / SCRIPT

    @property
    def log(self) -> Path:
        """Log file of all starts of the job."""
        return self.folder / f"job-{self.number or 'local'}.log"

    def write_number(self, number: str) -> None:
        """Write Slurm's job number to the folder."""
        write_atomically(self.folder / NUMBER, f"{number}\n".encode())


def list_jobs(run_folder: Path) -> list[Job]:
    """Return the jobs of a run, the newest last."""
    return [Job(path) for path in launch_folders(run_folder)]


def newest_job(run_folder: Path) -> Job | None:
    """Return the newest job of a run that was submitted or started, or None."""
    started = [job for job in list_jobs(run_folder) if job.is_started]
    return started[-1] if started else None


def acquire_local_lock(run_folder: Path) -> int | None:
    """Take the lock of a run for processes started on this machine. They inherit the lock.

    Returns:
        File descriptor that holds the lock while any process has it open; None if another process holds the lock.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = run_folder / LAUNCH
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise unwritable_error(folder, error) from error
    try:
        while not _try_flock(lock, fcntl.LOCK_EX):
            # `is_locally_locked` in another process may hold a shared lock, for a moment.
            if not _try_flock(lock, fcntl.LOCK_SH):
                os.close(lock)
                return None
            fcntl.flock(lock, fcntl.LOCK_UN)
            time.sleep(_LOCK_RETRY_SECONDS)
    except BaseException:
        os.close(lock)
        raise
    os.set_inheritable(lock, True)
    return lock


def _try_flock(descriptor: int, kind: int) -> bool:
    """Take a lock on an open file. Return False if another process holds one that excludes it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locally_locked(run_folder: Path) -> bool:
    """Return True if processes started on this machine train a run."""
    path = run_folder / LAUNCH / "lock"
    if not path.exists():
        return False
    with os.fdopen(open_regular(path), "rb") as lock:
        return not _try_flock(lock.fileno(), fcntl.LOCK_SH)


def local_environment(processes: int) -> dict[str, str]:
    """Return the environment for a job's script on this machine, without variables of a surrounding Slurm job."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return environment | {"SELECTRON_PROCESSES": str(processes)}


def copy_code(folder: Path) -> Path:
    """Copy the current code to `folder` and return the folder.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        for package in PACKAGES:
            shutil.copytree(git_info.ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise unwritable_error(folder, error) from error
    return folder


def write_job(
    config: RunConfig, run_folder: Path, resources: Resources, python: str, *, code: Path | None = None
) -> Job:
    """Write a job's folder with the current configuration and code.

    Args:
        config: whole configuration, see `load.resolve`.
        run_folder: run folder.
        resources: checked resources.
        python: Python interpreter of the ranks.
        code: copy of the code that several jobs share; None to make a copy for this job.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = (run_folder / LAUNCH).absolute()
    sbatch_options(resources, folder, "")  # raises before anything is written
    _container_command(resources, folder.parents[1])
    try:
        folder = next_folder(folder)
        (folder / CONFIG).write_text(to_yaml(config))
        if private := private_yaml(config):
            write_private(folder / PRIVATE, private.encode())
        if code is None:
            copy_code(folder / CODE)
        else:
            (folder / CODE).symlink_to(os.path.relpath(code, folder))
        (folder / "code.json").write_text(json.dumps({"commit": git_info.commit(), "python": python}, indent=1) + "\n")
        job = Job(folder)
        job.script.write_text(format_script(job, resources, python))
    except OSError as error:
        raise unwritable_error(folder, error) from error
    return job


def next_folder(parent: Path) -> Path:
    """Create the next of the numbered folders `1`, `2`, ... in `parent`. Concurrent calls get different folders.

    Raises:
        OSError: the folder cannot be created.
    """
    parent.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name) for path in parent.iterdir() if path.name.isdecimal()), default=0)
    while True:
        try:
            (parent / str(number)).mkdir()
        except FileExistsError:
            number += 1
        else:
            return parent / str(number)


@contextmanager
def hold_submission_locks(*run_folders: Path) -> Iterator[None]:
    """Context manager that prevents concurrent launches of the same runs.

    Inside the context, first check for existing jobs, and record the new jobs before leaving it.

    Args:
        run_folders: folders of the runs.

    Raises:
        UserError: another call launches one of the runs, or a folder cannot be written.
    """
    hint = "wait until that call ends, then check `selectron status`"
    with ExitStack() as stack:
        locks = []
        for folder in run_folders:
            locks.append(acquire(folder / SUBMISSION, f"the launch of {folder}", hint=hint))
            stack.callback(locks[-1].release)
        stack.pop_all()
        with hold_locks(*locks):
            yield


def unwritable_error(folder: Path, error: OSError) -> UserError:
    """Return the error for a folder in which nothing can be created."""
    return UserError(str(folder), f"cannot be written ({os_error_reason(error)})", "choose another run.dir")


def format_script(job: Job, resources: Resources, python: str) -> str:
    """Return the batch script: the template with the job's settings between its markers."""
    head, rest = TEMPLATE.read_text().split(_BEGIN)
    _, body = rest.split(_END)
    options = sbatch_options(resources, job.folder, "job-%j.log")
    srun, inside = _container_command(resources, job.run.parent)
    private = job.folder / PRIVATE
    configurations = [str(job.folder / CONFIG), *([str(private)] if private.exists() else [])]
    settings = [
        *slurm.directives(options),
        f"python={shlex.quote(python)}",
        f"requeues={resources.requeues}",
        f"folder={shlex.quote(str(job.folder))}",
        f"srun_options=({_quote_words(srun)})",
        f"inside=({_quote_words(inside)})",
        f"config=({_quote_words(configurations)})",
        f"preflight=({_quote_words(resources.preflight)})",
        # PYTHONSAFEPATH: otherwise Python would import from the working folder first, e.g. a checkout that has changed.
        f"code={shlex.quote(str(job.folder / CODE))}",
        'export PYTHONPATH="$code${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1',
    ]
    return head + _BEGIN + "\n".join(settings) + "\n" + _END + body


def sbatch_options(resources: Resources, folder: Path, log: str) -> list[str]:
    """Return the sbatch options of a job that is requeued and appends to one log.

    Args:
        resources: checked resources.
        folder: absolute folder of the log.
        log: file name of the log, a Slurm filename pattern.

    Raises:
        UserError: a path cannot be written in a batch script.
    """
    for where, path in (("run.dir", folder), ("the working folder", Path.cwd())):
        check_text(where, str(path))
        if "\\" in str(path):
            raise UserError(where, f"{path} contains a backslash, which Slurm drops", "choose a path without one")
    if ":" in str(folder):
        problem = f"{folder} contains a colon, which separates the entries of PYTHONPATH"
        raise UserError("run.dir", problem, "choose a path without one")
    return [
        f"--job-name={resources.job_name}",
        # In a file name, Slurm interprets % as the start of a pattern.
        f"--output={str(folder).replace('%', '%%')}/{log}",
        "--open-mode=append",
        "--requeue",
        f"--chdir={Path.cwd()}",
        *resources.sbatch_options(),
    ]


def _quote_words(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


def _container_command(resources: Resources, runs: Path) -> tuple[list[str], list[str]]:
    """Return the srun options and the command prefix that start a rank in its container."""
    if resources.container is None:
        return [], []
    mounts, working_folder = resources.container_mounts(runs), Path.cwd()
    for where, path in (("run.dir", runs), ("the working folder", working_folder)):
        if {",", ":"}.intersection(str(path)):
            problem = f"{path} contains a comma or a colon, which separate the container's mounts"
            raise UserError(where, problem, "choose a path without them, or omit --container")
    # An image has its own working folder, but run.dir and data.path are usually relative to the current one.
    if resources.container.endswith(".sif"):
        options = [f"--pwd={working_folder}", f"--bind={','.join(mounts)}"]
        return [], ["apptainer", "exec", "--nv", *options, resources.container]
    mount_pairs = ",".join(path if ":" in path else f"{path}:{path}" for path in mounts)
    image = f"--container-image={resources.container}"
    return [image, f"--container-mounts={mount_pairs}", f"--container-workdir={working_folder}"], []
