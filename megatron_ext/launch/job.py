"""The folder of a launched job: a batch script, and what the run is made of as it was then."""

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

from megatron_ext import source
from megatron_ext.config.save import private_yaml, to_yaml
from megatron_ext.config.schema import RunConfig
from megatron_ext.errors import UserError
from megatron_ext.events import EVENTS, LAUNCH, launches
from megatron_ext.files import open_regular, os_reason, read_regular, write_private, write_whole
from megatron_ext.launch import slurm
from megatron_ext.launch.resources import Resources
from megatron_ext.paths import check_text
from megatron_ext.run_folder.lock import held, take

TEMPLATE = Path(__file__).with_name("train.sbatch")
PACKAGES = ("megatron_ext", "kernels", "data_prep")
SCRIPT, CODE, NUMBER = "job.sbatch", "code", "job_id"
SUBMISSION = "submission"
"""Lock of a run while a call submits a job of it."""
PRIVATE = "private.yaml"
"""The address of the data where it has credentials, which config.yaml leaves out; only its owner can read it."""

_NUMBER = re.compile(r"[0-9]{1,12}(_[0-9]{1,12})?")
_NUMBER_HINT = "write the job's number into it (see squeue), or remove it if the job has ended"
_CLAIM_TRIES, _CLAIM_SECONDS = 5, 0.05
_BEGIN, _END = "# >>> job\n", "# <<< job\n"


@dataclass(frozen=True)
class Job:
    """A launched job of a run.

    Attributes:
        folder: RUN/launch/N.
    """

    folder: Path

    @property
    def number(self) -> str | None:
        """Slurm's; None where it was not submitted, or runs without Slurm.

        Raises:
            UserError: the file that holds it is damaged.
        """
        path = self.folder / NUMBER
        try:
            number = read_regular(path, 1 << 16).decode("ascii", "replace").strip() if path.exists() else None
        except OSError as error:
            raise UserError(str(path), f"cannot be read ({os_reason(error)})", _NUMBER_HINT) from error
        if number is not None and not _NUMBER.fullmatch(number):
            raise UserError(str(path), f"{number[:40]!r} is no number of a job of Slurm's", _NUMBER_HINT)
        return number  # it becomes an argument, and part of a log's name

    @property
    def is_begun(self) -> bool:
        """Whether it was submitted, or runs or ran here; a dry run's, for example, is not."""
        return (self.folder / NUMBER).exists() or (self.folder / EVENTS).exists()

    @property
    def run(self) -> Path:
        """Folder of the run."""
        return self.folder.parents[1]

    @property
    def script(self) -> Path:
        """The batch script."""
        return self.folder / SCRIPT

    @property
    def log(self) -> Path:
        """What the job prints, all its starts one after the other."""
        return self.folder / f"job-{self.number or 'local'}.log"

    def keep_number(self, number: str) -> None:
        """Note the number that Slurm gave it."""
        write_whole(self.folder / NUMBER, f"{number}\n".encode())


def jobs_of(run_folder: Path) -> list[Job]:
    """Jobs of a run, the newest last."""
    return [Job(path) for path in launches(run_folder)]


def newest_job(run_folder: Path) -> Job | None:
    """The newest job of a run that is begun; None: there is none."""
    begun = [job for job in jobs_of(run_folder) if job.is_begun]
    return begun[-1] if begun else None


def claim(run_folder: Path) -> int | None:
    """Take a run's lock for processes that are started here, which inherit it.

    Returns:
        A file descriptor that holds it as long as any process has it open; None: another process has it.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = run_folder / LAUNCH
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise unwritable(folder, error) from error
    for _ in range(_CLAIM_TRIES):  # whoever looks whether it is free holds it for a moment
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_CLAIM_SECONDS)
        else:
            os.set_inheritable(lock, True)
            return lock
    os.close(lock)
    return None


def is_claimed(run_folder: Path) -> bool:
    """Whether processes that were started here train a run."""
    path = run_folder / LAUNCH / "lock"
    if not path.exists():
        return False
    with os.fdopen(open_regular(path), "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def local_environment(processes: int) -> dict[str, str]:
    """Variables with which a job's script runs here, whatever Slurm job this process is part of."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return given | {"SELECTRON_PROCESSES": str(processes)}


def copy_code(folder: Path) -> Path:
    """Copy the code as it is now to a folder of this name, and return it.

    Raises:
        UserError: it cannot be written.
    """
    try:
        for package in PACKAGES:
            shutil.copytree(source.ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise unwritable(folder, error) from error
    return folder


def write_job(
    config: RunConfig, run_folder: Path, resources: Resources, python: str, *, code: Path | None = None
) -> Job:
    """Write a job's folder, with the configuration and the code as they are now.

    Args:
        config: whole, see `load.resolve`.
        run_folder: of the run.
        resources: checked.
        python: interpreter of the ranks.
        code: a copy that several jobs share; None: this one gets its own.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = (run_folder / LAUNCH).absolute()
    sbatch_options(resources, folder, "")  # refused before anything is made
    _container(resources, folder.parents[1])
    try:
        folder = next_folder(folder)
        (folder / "config.yaml").write_text(to_yaml(config))
        if private := private_yaml(config):
            write_private(folder / PRIVATE, private.encode())
        if code is None:
            copy_code(folder / CODE)
        else:
            (folder / CODE).symlink_to(os.path.relpath(code, folder))
        (folder / "code.json").write_text(json.dumps({"commit": source.commit(), "python": python}, indent=1) + "\n")
        job = Job(folder)
        job.script.write_text(script(job, resources, python))
    except OSError as error:
        raise unwritable(folder, error) from error
    return job


def next_folder(above: Path) -> Path:
    """Make the next of the folders `1`, `2`, ... in a folder: of several calls at once each gets another one.

    Raises:
        OSError: it cannot be made.
    """
    above.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name) for path in above.iterdir() if path.name.isdecimal()), default=0)
    while True:
        try:
            (above / str(number)).mkdir()
        except FileExistsError:
            number += 1
        else:
            return above / str(number)


@contextmanager
def submitting(*run_folders: Path) -> Iterator[None]:
    """Keep other calls from launching runs, from the look whether they have jobs until those of this call are noted.

    Args:
        run_folders: of the runs.

    Raises:
        UserError: another call launches one of them, or its folder cannot be written.
    """
    hint = "wait until that call is done, then see `selectron status`"
    with ExitStack() as taken:
        locks = []
        for folder in run_folders:
            locks.append(take(folder / SUBMISSION, f"the launch of {folder}", hint=hint))
            taken.callback(locks[-1].release)
        taken.pop_all()
        with held(*locks):
            yield


def unwritable(folder: Path, error: OSError) -> UserError:
    """What is said of a folder in which nothing can be made."""
    return UserError(str(folder), f"cannot be written ({os_reason(error)})", "choose another run.dir")


def script(job: Job, resources: Resources, python: str) -> str:
    """The template with a job's own lines between its marks."""
    head, rest = TEMPLATE.read_text().split(_BEGIN)
    _, body = rest.split(_END)
    options = sbatch_options(resources, job.folder, "job-%j.log")
    srun, inside = _container(resources, job.run.parent)
    private = job.folder / PRIVATE
    configurations = [str(job.folder / "config.yaml"), *([str(private)] if private.exists() else [])]
    settings = [
        *slurm.directives(options),
        f"python={shlex.quote(python)}",
        f"requeues={resources.requeues}",
        f"folder={shlex.quote(str(job.folder))}",
        f"srun_options=({_words(srun)})",
        f"inside=({_words(inside)})",
        f"config=({_words(configurations)})",
        f"preflight=({_words(resources.preflight)})",
        # Safe: else Python would find what stands in the working folder, a checkout that has moved on, before it.
        f"code={shlex.quote(str(job.folder / CODE))}",
        'export PYTHONPATH="$code${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1',
    ]
    return head + _BEGIN + "\n".join(settings) + "\n" + _END + body


def sbatch_options(resources: Resources, folder: Path, log: str) -> list[str]:
    """Options of sbatch for a job that starts anew and goes on writing to a file.

    Args:
        resources: checked.
        folder: of the file, absolute.
        log: its name, a pattern of Slurm's.

    Raises:
        UserError: a path cannot be written in a batch script.
    """
    for where, path in (("run.dir", folder), ("the working folder", Path.cwd())):
        check_text(where, str(path))
        if "\\" in str(path):
            raise UserError(where, f"{path} holds a backslash, which Slurm drops", "choose a path without")
    if ":" in str(folder):
        problem = f"{folder} holds a colon, with which PYTHONPATH is written: the copy of the code would not be found"
        raise UserError("run.dir", problem, "choose a path without")
    return [
        f"--job-name={resources.job_name}",
        # Slurm reads % in a file's name as the beginning of a pattern.
        f"--output={str(folder).replace('%', '%%')}/{log}",
        "--open-mode=append",
        "--requeue",
        f"--chdir={Path.cwd()}",
        *resources.sbatch_options(),
    ]


def _words(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


def _container(resources: Resources, runs: Path) -> tuple[list[str], list[str]]:
    """Options of srun, and the command that a rank is begun with."""
    if resources.container is None:
        return [], []
    seen, here = resources.mounts_in(runs), Path.cwd()
    for where, path in (("run.dir", runs), ("the working folder", here)):
        if {",", ":"}.intersection(str(path)):
            problem = f"{path} holds a comma or a colon, with which lists of mounts are written"
            raise UserError(where, problem, "choose a path without, or leave --container out")
    # An image has a working folder of its own, and run.dir and data.path are most often relative to this one.
    if resources.container.endswith(".sif"):
        return [], ["apptainer", "exec", "--nv", f"--pwd={here}", f"--bind={','.join(seen)}", resources.container]
    mounts = ",".join(path if ":" in path else f"{path}:{path}" for path in seen)
    image = f"--container-image={resources.container}"
    return [image, f"--container-mounts={mounts}", f"--container-workdir={here}"], []
