"""Jobs of a sweep as an array of Slurm: a task a run, each with a script, a log and a number of its own."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.events import LAUNCH
from megatron_ext.files import read_regular, write_whole
from megatron_ext.json_text import parse_json
from megatron_ext.launch import slurm
from megatron_ext.launch.job import NUMBER, SCRIPT, Job, next_folder, sbatch_options, unwritable
from megatron_ext.launch.readings import UNREADABLE, problem_of
from megatron_ext.launch.resources import Resources
from megatron_ext.paths import path_within

FOLDER = Path(LAUNCH) / "arrays"
_ARRAY, _JOBS = "array.sbatch", "jobs.json"
_BODY = f"""
# A task is the job of one run: it becomes that job's own script, which starts the task anew.
job=${{jobs[$SLURM_ARRAY_TASK_ID]}}
number=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
[ -e "$job/{NUMBER}" ] || echo "$number" >"$job/{NUMBER}" # whoever submitted it was stopped before it could
exec bash "$job/{SCRIPT}" >>"$job/job-$number.log" 2>&1
"""


@dataclass(frozen=True)
class Array:
    """An array of a sweep.

    Attributes:
        folder: RUNS/launch/arrays/N.
    """

    folder: Path

    @property
    def script(self) -> Path:
        """The batch script."""
        return self.folder / _ARRAY

    @property
    def jobs(self) -> list[Job]:
        """Its tasks' jobs, in their order.

        Raises:
            UserError: the file that lists them is damaged.
        """
        runs, path = self.folder.parents[len(FOLDER.parts)], self.folder / _JOBS
        try:
            return [Job(_inside(runs, name, str(path))) for name in parse_json(read_regular(path))]
        except UNREADABLE as error:
            raise UserError(str(path), problem_of(error), f"remove {self.folder} if its jobs have ended") from error

    def submit(self) -> None:
        """Submit it, and note the number of each job.

        Raises:
            UserError: Slurm refuses.
        """
        self.keep_number(slurm.submit(self.script))

    def keep_number(self, number: str) -> None:
        """Note the number that Slurm gave it with each of its jobs."""
        for task, job in enumerate(self.jobs):
            job.keep_number(f"{number}_{task}")


def write_array(
    runs: Path, jobs: Sequence[Job], resources: Resources, *, parallel: int | None, after: str | None
) -> Array:
    """Write an array's folder.

    Args:
        runs: of the sweep.
        jobs: one of each run.
        resources: of each.
        parallel: most tasks at a time; None: as many as Slurm gives.
        after: job that must end well before these begin; None: there is none.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = (runs / FOLDER).absolute()
    try:
        folder = next_folder(folder)
    except OSError as error:
        raise unwritable(folder, error) from error
    limit = f"%{parallel}" if parallel else ""
    options = [
        *sbatch_options(resources, folder, "array.log"),  # each task has a log of its own besides
        f"{tasks(len(jobs))}{limit}",
        # What waits for a run that does not end well would wait for ever.
        *([f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []),
    ]
    lines = [
        "#!/usr/bin/env bash",
        *slurm.directives(options),
        "jobs=(",
        *(f"    {shlex.quote(str(job.folder))}" for job in jobs),
        ")",
    ]
    array = Array(folder)
    try:
        array.script.write_text("\n".join(lines) + _BODY)
        write_whole(folder / _JOBS, json.dumps([str(job.folder) for job in jobs], indent=1).encode())
    except OSError as error:
        raise unwritable(folder, error) from error
    return array


def _inside(runs: Path, name: str, where: str) -> Path:
    """A job's folder, which is below the sweep's; jobs' numbers are written there."""
    # Records have absolute paths, which may lead to the runs by other links than this call's.
    path = Path(name)
    inner = path.resolve().relative_to(runs.resolve()) if path.resolve().is_relative_to(runs.resolve()) else path
    return path_within(runs, str(inner), where)


def tasks(number: int) -> str:
    """The option of sbatch for as many tasks."""
    return f"--array=0-{number - 1}"


def find_lost(runs: Path) -> None:
    """Note the numbers of arrays that were submitted by a call that was stopped before it could.

    Raises:
        UserError: Slurm does not answer.
    """
    lost = [array for array in _arrays(runs) if any(job.number is None for job in array.jobs)]
    numbers = slurm.numbers_by_script() if lost else {}
    for array in lost:
        if str(array.script) in numbers:
            array.keep_number(numbers[str(array.script)])


def _arrays(runs: Path) -> list[Array]:
    return [Array(path.parent) for path in (runs / FOLDER).glob(f"*/{_JOBS}")]
