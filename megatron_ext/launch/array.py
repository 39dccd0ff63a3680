"""Slurm job arrays for sweeps: one task per run, each with its own script, log and job number."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.launch import slurm
from megatron_ext.launch.job import NUMBER, SCRIPT, Job, next_folder, sbatch_options, unwritable
from megatron_ext.launch.readings import UNREADABLE, problem_of
from megatron_ext.launch.resources import Resources
from megatron_ext.run_folder.launch_events import LAUNCH
from megatron_ext.utils.atomic_files import read_regular, write_atomically
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json
from megatron_ext.utils.untrusted_paths import path_within

FOLDER = Path(LAUNCH) / "arrays"
_ARRAY, _JOBS = "array.sbatch", "jobs.json"
_BODY = f"""
# A task is the job of one run: it executes the script of that job, which also requeues the task.
job=${{jobs[$SLURM_ARRAY_TASK_ID]}}
number=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
[ -e "$job/{NUMBER}" ] || echo "$number" >"$job/{NUMBER}" # the submitting process was stopped before writing it
exec bash "$job/{SCRIPT}" >>"$job/job-$number.log" 2>&1
"""


@dataclass(frozen=True)
class Array:
    """Slurm job array of a sweep.

    Attributes:
        folder: RUNS/launch/arrays/N.
    """

    folder: Path

    @property
    def script(self) -> Path:
        """Batch script."""
        return self.folder / _ARRAY

    @property
    def jobs(self) -> list[Job]:
        """Jobs of the array's tasks, in order.

        Raises:
            UserError: the file that lists them is damaged.
        """
        runs, path = self.folder.parents[len(FOLDER.parts)], self.folder / _JOBS
        try:
            return [Job(_inside(runs, name, str(path))) for name in parse_json(read_regular(path))]
        except UNREADABLE as error:
            raise UserError(str(path), problem_of(error), f"remove {self.folder} if its jobs have ended") from error

    def submit(self) -> None:
        """Submit the array, and write the number of each job to its folder.

        Raises:
            UserError: Slurm rejects the array.
        """
        self.keep_number(slurm.submit(self.script))

    def keep_number(self, number: str) -> None:
        """Write the job numbers of the tasks, given the array's number from Slurm."""
        for task, job in enumerate(self.jobs):
            job.keep_number(f"{number}_{task}")


def write_array(
    runs: Path, jobs: Sequence[Job], resources: Resources, *, parallel: int | None, after: str | None
) -> Array:
    """Write an array's folder.

    Args:
        runs: folder of the sweep.
        jobs: one job per run.
        resources: resources of each run.
        parallel: maximum number of concurrent tasks; None for no limit.
        after: number of a Slurm job that must end successfully before the array starts, or None.

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
        *sbatch_options(resources, folder, "array.log"),  # each task also has its own log
        f"{tasks(len(jobs))}{limit}",
        # Without --kill-on-invalid-dep, jobs would wait forever for a run that failed.
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
        write_atomically(folder / _JOBS, json.dumps([str(job.folder) for job in jobs], indent=1).encode())
    except OSError as error:
        raise unwritable(folder, error) from error
    return array


def _inside(runs: Path, name: str, where: str) -> Path:
    """Return a job's folder, to which its number is written, after checking that it is below the sweep's folder."""
    # The file contains absolute paths, which may lead to the runs through other links than `runs` does.
    path = Path(name)
    inner = path.resolve().relative_to(runs.resolve()) if path.resolve().is_relative_to(runs.resolve()) else path
    return path_within(runs, str(inner), where)


def tasks(number: int) -> str:
    """Return the sbatch option for an array of `number` tasks."""
    return f"--array=0-{number - 1}"


def find_lost(runs: Path) -> None:
    """Write the missing job numbers of arrays whose submitting process was killed before it wrote them.

    Raises:
        UserError: Slurm does not respond.
    """
    lost = [array for array in _arrays(runs) if any(job.number is None for job in array.jobs)]
    numbers = slurm.numbers_by_script() if lost else {}
    for array in lost:
        if str(array.script) in numbers:
            array.keep_number(numbers[str(array.script)])


def _arrays(runs: Path) -> list[Array]:
    return [Array(path.parent) for path in (runs / FOLDER).glob(f"*/{_JOBS}")]
