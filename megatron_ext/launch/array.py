"""Slurm job arrays for sweeps: one task per run, each with its own script, log and job number."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.launch import slurm
from megatron_ext.launch.job import NUMBER, SCRIPT, Job, next_folder, sbatch_options, unwritable_error
from megatron_ext.launch.readings import READ_ERRORS, describe_read_error
from megatron_ext.launch.resources import Resources
from megatron_ext.run_folder.launch_events import LAUNCH
from megatron_ext.utils.atomic_files import read_regular, write_atomically
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json
from megatron_ext.utils.untrusted_paths import path_within

FOLDER = Path(LAUNCH) / "arrays"
_SCRIPT_NAME, _JOBS_FILE = "array.sbatch", "jobs.json"
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
        return self.folder / _SCRIPT_NAME

    @property
    def jobs(self) -> list[Job]:
        """Jobs of the array's tasks, in order.

        Raises:
            UserError: the file that lists them is damaged.
        """
        runs, path = self.folder.parents[len(FOLDER.parts)], self.folder / _JOBS_FILE
        try:
            return [Job(_job_folder(runs, name, str(path))) for name in parse_json(read_regular(path))]
        except READ_ERRORS as error:
            raise UserError(
                str(path), describe_read_error(error), f"remove {self.folder} if its jobs have ended"
            ) from error

    def submit(self) -> None:
        """Submit the array, and write the number of each job to its folder.

        Raises:
            UserError: Slurm rejects the array.
        """
        self.write_number(slurm.submit(self.script))

    def write_number(self, number: str) -> None:
        """Write the job numbers of the tasks, given the array's number from Slurm."""
        for task, job in enumerate(self.jobs):
            job.write_number(f"{number}_{task}")


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
        raise unwritable_error(folder, error) from error
    limit = f"%{parallel}" if parallel else ""
    options = [
        *sbatch_options(resources, folder, "array.log"),  # each task also has its own log
        f"{array_option(len(jobs))}{limit}",
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
        write_atomically(folder / _JOBS_FILE, json.dumps([str(job.folder) for job in jobs], indent=1).encode())
    except OSError as error:
        raise unwritable_error(folder, error) from error
    return array


def _job_folder(runs: Path, name: str, where: str) -> Path:
    """Return a job's folder, to which its number is written, after checking that it is below the sweep's folder."""
    # The file contains absolute paths, which may lead to the runs through other links than `runs` does.
    path, root = Path(name).resolve(), runs.resolve()
    return path_within(runs, str(path.relative_to(root)) if path.is_relative_to(root) else name, where)


def array_option(num_tasks: int) -> str:
    """Return the sbatch option for an array of `num_tasks` tasks."""
    return f"--array=0-{num_tasks - 1}"


def restore_job_numbers(runs: Path) -> None:
    """Write the missing job numbers of arrays whose submitting process was killed before it wrote them.

    Raises:
        UserError: Slurm does not respond.
    """
    incomplete = [array for array in _arrays(runs) if any(job.number is None for job in array.jobs)]
    numbers = slurm.numbers_by_script() if incomplete else {}
    for array in incomplete:
        if str(array.script) in numbers:
            array.write_number(numbers[str(array.script)])


def _arrays(runs: Path) -> list[Array]:
    return [Array(path.parent) for path in (runs / FOLDER).glob(f"*/{_JOBS_FILE}")]
