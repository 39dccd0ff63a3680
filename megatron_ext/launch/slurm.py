"""Interface to Slurm's commands: partitions, job states, submission and cancellation."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.utils.errors import UserError
from megatron_ext.utils.temp_dirs import scratch_folder
from megatron_ext.utils.untrusted_paths import check_text

UNLIMITED = "infinite"


@dataclass(frozen=True)
class Partition:
    """Slurm partition, whose nodes may differ.

    Attributes:
        name: name of the partition.
        nodes: number of nodes.
        gpus_per_node: maximum number of GPUs of a node.
        tasks_per_node: maximum number of processors of a node.
        time_limit: time limit as Slurm writes it, or `infinite`.
        is_default: True if Slurm uses the partition for jobs that name none.
    """

    name: str
    nodes: int
    gpus_per_node: int
    tasks_per_node: int
    time_limit: str
    is_default: bool


def check_installed() -> None:
    """Check that jobs can be submitted from this machine.

    Raises:
        UserError: sbatch is not installed.
    """
    if shutil.which("sbatch") is None:
        problem = "there is no sbatch on this machine"
        raise UserError(
            "selectron launch", problem, "run it on a login node, or use --local N to start N processes here"
        )


def partitions() -> dict[str, Partition]:
    """Return all partitions visible to this user, by name.

    Raises:
        UserError: Slurm does not respond.
    """
    found: dict[str, Partition] = {}
    for line in run_command("sinfo", "--noheader", "--format=%P|%D|%G|%c|%l").splitlines():
        name, nodes, resources, processors, limit = line.split("|")
        bare, before = name.rstrip("*"), found.get(name.rstrip("*"))
        found[bare] = Partition(
            name=bare,
            nodes=int(nodes) + (before.nodes if before else 0),
            gpus_per_node=max(_count_gpus(resources), before.gpus_per_node if before else 0),
            tasks_per_node=max(int(processors.rstrip("+")), before.tasks_per_node if before else 0),
            time_limit=limit,
            is_default=name.endswith("*"),
        )
    return found


def _count_gpus(resources: str) -> int:
    """Count the GPUs of a node in sinfo's format: `gpu:8`, `gpu:h200:8(S:0-1)`, `gpu:a:4,gpu:b:4`, `(null)`."""
    return sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", resources))


@dataclass(frozen=True)
class JobState:
    """State of a job in Slurm.

    Attributes:
        state: PENDING, RUNNING, COMPLETED, ...
        reason: reason why the job is pending; empty if there is no reason.
        nodes: nodes on which the job runs.
        script: path of the job's batch script, or what Slurm shows instead; None if unknown.
    """

    state: str
    reason: str
    nodes: str
    script: str | None = None

    @property
    def is_alive(self) -> bool:
        """True if the job waits or runs."""
        return self.state in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED"}


def job_state(job: str) -> JobState | None:
    """Return the state of a job; None if Slurm no longer lists the job, some minutes after its end.

    Raises:
        UserError: Slurm does not respond.
    """
    command = ("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r|%N|%o")
    result = _run_process(command)
    if result.returncode and "Invalid job id" in result.stderr:
        return None
    if result.returncode:
        raise _rejection_error(command, result.stderr)
    if not result.stdout.strip():
        return None
    state, reason, nodes, script = result.stdout.splitlines()[0].split("|", 3)
    return JobState(state, "" if reason == "None" else reason, nodes, script)


def directives(options: Sequence[str]) -> list[str]:
    """Return sbatch options as lines of a batch script, quoted for Slurm's shell-like parser.

    Raises:
        UserError: an option contains control characters. A newline would end the line, and the rest would be executed.
    """
    for option in options:
        check_text("--sbatch", option)
    return [f"#SBATCH {shlex.quote(option)}" for option in options]


def check_options(options: Sequence[str]) -> None:
    """Check with `sbatch --test-only` that a job with these options could ever run. Nothing is submitted.

    Only Slurm can decide this if the nodes of a partition differ, because `sinfo` summarizes them.

    Args:
        options: sbatch options as in a batch script.

    Raises:
        UserError: Slurm rejects the options; the message contains its error.
    """
    with scratch_folder("options") as folder:
        script = folder / "options.sbatch"
        script.write_text("\n".join(["#!/bin/sh", *directives(options), ""]))
        run_command("sbatch", "--test-only", str(script))


def submit(script: Path) -> str:
    """Submit a batch script and return the job number.

    Raises:
        UserError: Slurm rejects the script; the message contains Slurm's error.
    """
    return run_command("sbatch", "--parsable", str(script)).strip().split(";")[0]


def numbers_by_script() -> dict[str, str]:
    """Return the numbers of this user's waiting and running jobs, by path of the script; one number for a whole array.

    Raises:
        UserError: Slurm does not respond.
    """
    lines = (line.partition(" ") for line in run_command("squeue", "--noheader", "--me", "--format=%F %o").splitlines())
    return {script: number for number, _, script in lines}


def cancel(job: str) -> None:
    """Cancel a job.

    Raises:
        UserError: Slurm does not cancel the job.
    """
    run_command("scancel", job)


def run_command(*command: str) -> str:
    """Run a Slurm command and return its standard output.

    Raises:
        UserError: the command fails or is not installed.
    """
    result = _run_process(command)
    if result.returncode:
        raise _rejection_error(command, result.stderr)
    return result.stdout


def _run_process(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(
            command[0], "is not installed on this machine", "run it on a login node of the cluster"
        ) from None


def _rejection_error(command: tuple[str, ...], errors: str) -> UserError:
    messages = [line.split(": ", 1)[-1].strip() for line in errors.splitlines() if "error" in line]
    return UserError(command[0], f"refused: {'; '.join(messages) or errors.strip()}", "correct this and try again")
