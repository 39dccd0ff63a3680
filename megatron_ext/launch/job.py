"""The folder of a launched job: a batch script, and what the run is made of as it was then."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext import source
from megatron_ext.config.save import to_yaml
from megatron_ext.config.schema import RunConfig
from megatron_ext.errors import UserError
from megatron_ext.files import write_whole
from megatron_ext.launch.resources import Resources

TEMPLATE = Path(__file__).with_name("train.sbatch")
PACKAGES = ("megatron_ext", "kernels", "data_prep")
SCRIPT, CODE, EVENTS, NUMBER = "job.sbatch", "code", "events.tsv", "job_id"
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
        """Slurm's; None where it was not submitted, or runs without Slurm."""
        path = self.folder / NUMBER
        return path.read_text().strip() if path.exists() else None

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
    folders = [path for path in (run_folder / "launch").glob("*") if path.name.isdecimal()]
    return [Job(path) for path in sorted(folders, key=lambda path: int(path.name))]


def claim(run_folder: Path) -> int | None:
    """Take a run's lock for processes that are started here, which inherit it.

    Returns:
        A file descriptor that holds it as long as any process has it open; None: another process has it.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = run_folder / "launch"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    os.set_inheritable(lock, True)
    return lock


def local_environment(processes: int) -> dict[str, str]:
    """Variables with which a job's script runs here, whatever Slurm job this process is part of."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return given | {"SELECTRON_PROCESSES": str(processes)}


def write_job(config: RunConfig, run_folder: Path, resources: Resources, python: str) -> Job:
    """Write a job's folder, with the configuration and the code as they are now.

    Args:
        config: whole, see `load.resolve`.
        run_folder: of the run.
        resources: checked.
        python: interpreter of the ranks.

    Raises:
        UserError: the folder cannot be written.
    """
    before = jobs_of(run_folder)
    folder = (run_folder / "launch" / str(int(before[-1].folder.name) + 1 if before else 1)).absolute()
    try:
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(to_yaml(config))
        for package in PACKAGES:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source.ROOT / package, folder / CODE / package, ignore=ignored)
        (folder / "code.json").write_text(json.dumps({"commit": source.commit(), "python": python}, indent=1) + "\n")
        job = Job(folder)
        job.script.write_text(script(job, resources, python))
    except OSError as error:
        raise unwritable(folder, error) from error
    return job


def unwritable(folder: Path, error: OSError) -> UserError:
    """What is said of a folder in which nothing can be made."""
    return UserError(str(folder), f"cannot be written ({error.strerror})", "choose another run.dir")


def script(job: Job, resources: Resources, python: str) -> str:
    """The template with a job's own lines between its marks."""
    head, rest = TEMPLATE.read_text().split(_BEGIN)
    _, body = rest.split(_END)
    options = [
        f"--job-name={resources.job_name}",
        f"--output={job.folder}/job-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--chdir={Path.cwd()}",
        *resources.sbatch_options(),
    ]
    srun, inside = _container(resources, job.folder)
    settings = [
        *(f"#SBATCH {option}" for option in options),
        f"python={shlex.quote(python)}",
        f"requeues={resources.requeues}",
        f"folder={shlex.quote(str(job.folder))}",
        f"srun_options=({_words(srun)})",
        f"inside=({_words(inside)})",
        f"config=({shlex.quote(str(job.folder / 'config.yaml'))})",
        # Safe: else Python would find what stands in the working folder, a checkout that has moved on, before it.
        f"code={shlex.quote(str(job.folder / CODE))}",
        'export PYTHONPATH="$code${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1',
    ]
    return head + _BEGIN + "\n".join(settings) + "\n" + _END + body


def _words(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


def _container(resources: Resources, folder: Path) -> tuple[list[str], list[str]]:
    """Options of srun, and the command that a rank is begun with."""
    if resources.container is None:
        return [], []
    seen = list(dict.fromkeys([str(Path.cwd()), str(folder), *resources.mounts]))
    if resources.container.endswith(".sif"):
        return [], ["apptainer", "exec", "--nv", f"--bind={','.join(seen)}", resources.container]
    mounts = ",".join(path if ":" in path else f"{path}:{path}" for path in seen)
    return [f"--container-image={resources.container}", f"--container-mounts={mounts}"], []
