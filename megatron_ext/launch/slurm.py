"""What Slurm says of its partitions and jobs, and what it is asked to do."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.paths import check_text
from megatron_ext.scratch import scratch_folder

UNLIMITED = "infinite"


@dataclass(frozen=True)
class Partition:
    """A partition, of nodes that may differ.

    Attributes:
        name: of the partition.
        nodes: their number.
        gpus_per_node: of the node with the most.
        tasks_per_node: processors of the node with the most.
        time_limit: as Slurm writes it, or `infinite`.
        is_default: whether it is taken where none is named.
    """

    name: str
    nodes: int
    gpus_per_node: int
    tasks_per_node: int
    time_limit: str
    is_default: bool


def check_installed() -> None:
    """Refuse a machine from which no job can be submitted.

    Raises:
        UserError: sbatch is not there.
    """
    if shutil.which("sbatch") is None:
        problem = "there is no sbatch on this machine"
        raise UserError(
            "selectron launch", problem, "call it on a login node, or give --local N to start N processes here"
        )


def partitions() -> dict[str, Partition]:
    """All partitions that this user sees, by name.

    Raises:
        UserError: Slurm does not answer.
    """
    found: dict[str, Partition] = {}
    for line in ask("sinfo", "--noheader", "--format=%P|%D|%G|%c|%l").splitlines():
        name, nodes, resources, processors, limit = line.split("|")
        bare, before = name.rstrip("*"), found.get(name.rstrip("*"))
        found[bare] = Partition(
            name=bare,
            nodes=int(nodes) + (before.nodes if before else 0),
            gpus_per_node=max(_gpus(resources), before.gpus_per_node if before else 0),
            tasks_per_node=max(int(processors.rstrip("+")), before.tasks_per_node if before else 0),
            time_limit=limit,
            is_default=name.endswith("*"),
        )
    return found


def _gpus(resources: str) -> int:
    """GPUs of a node in Slurm's words: `gpu:8`, `gpu:h200:8(S:0-1)`, `gpu:a:4,gpu:b:4`, `(null)`."""
    return sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", resources))


@dataclass(frozen=True)
class JobState:
    """What Slurm knows of a job.

    Attributes:
        state: PENDING, RUNNING, COMPLETED, ...
        reason: why it waits; empty where it does not.
        nodes: where it runs.
        script: path of its batch script, or what Slurm says in its place; None: not known.
    """

    state: str
    reason: str
    nodes: str
    script: str | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it runs or will."""
        return self.state in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED"}


def job_state(job: str) -> JobState | None:
    """The state of a job; None where Slurm has forgotten it, some minutes after its end.

    Raises:
        UserError: Slurm does not answer.
    """
    command = ("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r|%N|%o")
    done = _called(command)
    if done.returncode and "Invalid job id" in done.stderr:
        return None
    if done.returncode:
        raise _refusal(command, done.stderr)
    if not done.stdout.strip():
        return None
    state, reason, nodes, script = done.stdout.splitlines()[0].split("|", 3)
    return JobState(state, "" if reason == "None" else reason, nodes, script)


def directives(options: Sequence[str]) -> list[str]:
    """Options of sbatch as lines of a batch script, which Slurm cuts into words nearly as a shell does.

    Raises:
        UserError: an option holds control characters: a newline would end the line, and what follows would be run.
    """
    for option in options:
        check_text("--sbatch", option)
    return [f"#SBATCH {shlex.quote(option)}" for option in options]


def check_options(options: Sequence[str]) -> None:
    """Ask Slurm whether it could ever run a job of these options, of which nothing is written or submitted yet.

    `sinfo` sums up a partition whose nodes differ: which of them together have what is asked for, Slurm alone knows.

    Args:
        options: as they stand in a batch script.

    Raises:
        UserError: Slurm refuses them; its own words say why.
    """
    with scratch_folder("options") as folder:
        script = folder / "options.sbatch"
        script.write_text("\n".join(["#!/bin/sh", *directives(options), ""]))
        ask("sbatch", "--test-only", str(script))


def submit(script: Path) -> str:
    """Submit a batch script, and return the job's number.

    Raises:
        UserError: Slurm refuses it; its own words say why.
    """
    return ask("sbatch", "--parsable", str(script)).strip().split(";")[0]


def numbers_by_script() -> dict[str, str]:
    """This user's jobs that wait or run, by the path of their script; of an array the whole's number.

    Raises:
        UserError: Slurm does not answer.
    """
    lines = (line.partition(" ") for line in ask("squeue", "--noheader", "--me", "--format=%F %o").splitlines())
    return {script: number for number, _, script in lines}


def cancel(job: str) -> None:
    """End a job.

    Raises:
        UserError: Slurm does not do so.
    """
    ask("scancel", job)


def ask(*command: str) -> str:
    """What a command of Slurm prints.

    Raises:
        UserError: it fails.
    """
    done = _called(command)
    if done.returncode:
        raise _refusal(command, done.stderr)
    return done.stdout


def _called(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(
            command[0], "is not installed on this machine", "call it on a login node of the cluster"
        ) from None


def _refusal(command: tuple[str, ...], errors: str) -> UserError:
    said = [line.split(": ", 1)[-1].strip() for line in errors.splitlines() if "error" in line]
    return UserError(command[0], f"refused: {'; '.join(said) or errors.strip()}", "mend what it names and call again")
