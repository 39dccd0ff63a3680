"""Faults that drills inject into a run on a cluster, and their repair."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from rank_server import ranks_of
from sabotaged import holding_file
from slurm_cluster import SlurmCluster
from slurm_runs import number, state, wait_for

LOOKS_AT_LIMITS = 30
"""Seconds between two checks of job time limits by Slurm. It is not configurable."""

Act = Callable[[SlurmCluster, Path], object]
"""Function that acts on a cluster, or on the run in the given folder."""


def nothing(cluster: SlurmCluster, folder: Path) -> None:
    """Do nothing: some faults pass by themselves."""


def kill_a_rank(cluster: SlurmCluster, folder: Path) -> None:
    """Kill a rank with SIGKILL, as the kernel does when memory runs out."""
    os.kill(ranks_of(folder)[-1], signal.SIGKILL)


def stop_a_rank(cluster: SlurmCluster, folder: Path) -> None:
    """Stop a rank, so that it neither ends nor makes progress."""
    os.kill(ranks_of(folder)[-1], signal.SIGSTOP)


def damage_newest_checkpoint(cluster: SlurmCluster, folder: Path) -> None:
    """Flip a bit of the largest file of the newest checkpoint."""
    checkpoints = folder / "checkpoints"
    newest = checkpoints / f"{(checkpoints / 'latest').read_text().strip()}"
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def preempt(cluster: SlurmCluster, folder: Path) -> None:
    """Submit a job of another partition that takes the nodes for three seconds."""
    where = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
    cluster.run("sbatch", *where, "--wrap=sleep 3")


def cut_power(name: str) -> Act:
    """Return an act that cuts the power of a node."""
    return lambda cluster, folder: cluster.kill_node(name)


def start(name: str) -> Act:
    """Return an act that starts a node after a power cut."""
    return lambda cluster, folder: cluster.start_node(name)


def start_anew(name: str) -> Act:
    """Return an act that starts a node with a cut link anew, and Slurm's controller.

    For more than a minute both the node and the controller try again what the cut link prevented: they report the end
    of the old step, and end it. The step of the next start has the same id. Slurm's wait of two minutes, which drills
    shorten, is longer than that.
    """

    def act(cluster: SlurmCluster, folder: Path) -> None:
        cluster.kill_node(name)
        cluster.start_node(name)
        cluster.restart_controller("TERM")

    return act


def shorten(cluster: SlurmCluster, folder: Path) -> None:
    """Set the job's end time to half a minute from now.

    Slurm checks time limits every half minute. It first warns of limits that expire before the next check, and ends the
    job at that check.
    """
    cluster.run("scontrol", "update", f"JobId={number(folder)}", f"EndTime=now+{LOOKS_AT_LIMITS + 1}")


def lengthen_next_start(cluster: SlurmCluster, folder: Path) -> None:
    """Give the next start of the job enough time. Slurm accepts a new limit only once the job is pending."""
    wait_for(folder, lambda: state(cluster, folder) == "PENDING")
    holding_file(folder).unlink(missing_ok=True)  # of a start that has been killed
    cluster.run("scontrol", "update", f"JobId={number(folder)}", "TimeLimit=10")
