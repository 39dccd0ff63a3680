"""`selectron launch` on a real Slurm of two nodes with two processes each, against runs that nothing disturbs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from corpora import prepared
from launching import curve, must_run, records, write_config
from slurm_cluster import SlurmCluster, missing

from megatron_ext.launch import slurm
from megatron_ext.launch.job import jobs_of
from megatron_ext.launch.status import events_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "never")]

STEPS = 60
FIELDS = [f"training.steps={STEPS}", "training.evaluate_every=0", "training.micro_batch_size=1"]
CLI = (sys.executable, "-m", "megatron_ext.cli")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    started = SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=2, cpus=2)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    return write_config(folder, prepared(folder), folder / "runs")


@pytest.fixture(scope="module")
def undisturbed(cluster: SlurmCluster, config: Path) -> Path:
    """A run that nothing disturbs, finished."""
    return finished(cluster, launched(cluster, config, "undisturbed"))


def launched(cluster: SlurmCluster, config: Path, name: str) -> Path:
    """Launch a run on both nodes, as a user does; its folder."""
    options = ["--nodes", "2", "--processes-per-node", "2", "--time", "10"]
    printed = cluster.run(*CLI, "launch", str(config), *FIELDS, f"run.name={name}", *options)
    folder = config.parent / "runs" / name
    (job,) = jobs_of(folder)
    assert f"job:    {job.number}\n" in printed
    assert f"log:    {job.log}\n" in printed
    return folder


def happened(folder: Path) -> list[str]:
    return [event.what for event in events_of(jobs_of(folder)[-1])]


def wait_for(folder: Path, condition: Callable[[], object], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        log = jobs_of(folder)[-1].log
        assert time.monotonic() < end, (happened(folder), log.read_text() if log.exists() else "no log")
        time.sleep(0.05)


def finished(cluster: SlurmCluster, folder: Path) -> Path:
    """Wait for the end of a run.

    A job that starts anew is held for two minutes by Slurm, and must be for some time: a node takes a job begun in the
    second in which it was requeued for the one that it has just ended.
    """
    number = jobs_of(folder)[-1].number

    def is_finished() -> bool:
        held = cluster.run("squeue", "--noheader", f"--jobs={number}", "--format=%T %r", check=False)
        if held.strip() == "PENDING BeginTime":
            cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now+3")
            time.sleep(3)
        time.sleep(0.2)
        return happened(folder)[-1:] == ["finished"]

    wait_for(folder, is_finished)
    return folder


def wait_for_step(folder: Path, step: int) -> None:
    wait_for(folder, lambda: len(records(folder)) >= step)


def ranks_of(folder: Path) -> list[int]:
    """Processes of a run's ranks, whatever node they are on."""
    found = subprocess.run(["pgrep", "-f", f"cli train {folder}/launch"], capture_output=True, text=True, check=False)
    pids = [int(pid) for pid in found.stdout.split()]
    return [pid for pid in pids if os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")]


def test_two_nodes_train_as_one_machine(undisturbed: Path, config: Path) -> None:
    must_run(config, [*FIELDS, "run.name=one_machine"], processes=4)
    assert curve(undisturbed) == curve(config.parent / "runs" / "one_machine")
    assert len(curve(undisturbed)) == STEPS
    assert happened(undisturbed) == ["begun on n1,n2", "finished"]


def test_a_job_starts_anew_before_its_time_is_up(cluster: SlurmCluster, config: Path, undisturbed: Path) -> None:
    """As `--signal=B:USR1@180` has Slurm send it."""
    folder = launched(cluster, config, "time_is_up")
    wait_for_step(folder, 5)
    cluster.run("scancel", "--batch", "--signal=USR1", str(jobs_of(folder)[-1].number))
    finished(cluster, folder)
    assert happened(folder) == [
        "begun on n1,n2",
        "asked to stop by USR1",
        "ended with exit code 0",
        "starts anew",
        "begun on n1,n2",
        "finished",
    ]
    assert curve(folder) == curve(undisturbed)


def test_a_killed_rank(cluster: SlurmCluster, config: Path, undisturbed: Path) -> None:
    folder = launched(cluster, config, "killed_rank")
    wait_for_step(folder, 5)
    ranks = ranks_of(folder)
    assert len(ranks) == 4
    os.kill(ranks[-1], signal.SIGKILL)
    finished(cluster, folder)
    begun, ended, *again = happened(folder)
    assert begun == "begun on n1,n2"
    assert ended in (
        "ended with exit code 137",
        "ended with exit code 143",
    )  # srun's: of the rank, or of one ended then
    assert again == ["starts anew", begun, "finished"]
    assert curve(folder) == curve(undisturbed)
    (last,) = cluster.run(*CLI, "logs", str(folder), "--lines", "1").splitlines()
    assert last.endswith(f"finished: {STEPS} steps, {STEPS * 256:,} tokens, in {folder}")
    row = cluster.run(*CLI, "status", str(folder)).splitlines()[2]
    assert [cell.strip() for cell in row.split("|")][1:6] == [
        "killed_rank",
        str(jobs_of(folder)[-1].number),
        "completed",
        "2",
        f"{STEPS} of {STEPS}",
    ]


def test_a_job_that_is_cancelled_does_not_start_anew(cluster: SlurmCluster, config: Path) -> None:
    folder = config.parent / "runs" / "cancelled"
    cluster.run(*CLI, "launch", str(config), *FIELDS, "training.steps=100000", "run.name=cancelled")
    wait_for_step(folder, 3)
    with pytest.raises(RuntimeError, match=r"run.name: \S*cancelled has job \d+ \(running\); `selectron cancel"):
        cluster.run(*CLI, "launch", str(config), *FIELDS, "run.name=cancelled", "--resume")
    number = jobs_of(folder)[-1].number
    assert cluster.run(*CLI, "cancel", str(folder)) == f"cancelled: job {number} is cancelled\n"
    wait_for(
        folder,
        lambda: cluster.run("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T").startswith(
            "CANCELLED"
        ),
    )
    assert "starts anew" not in happened(folder)


FAILS_ONCE = """#!/bin/sh
case "$*" in *seed2*) [ -e {folder}/mended ] || exit 3 ;; esac
"""


def test_a_sweep_submits_what_is_not_finished(cluster: SlurmCluster, config: Path, tmp_path: Path) -> None:
    """With a shell program in the place of training."""
    program, sweep = tmp_path / "program", config.parent / "seeds.yaml"
    program.write_text(FAILS_ONCE.format(folder=tmp_path))
    program.chmod(0o755)
    sweep.write_text(f"config: {config.name}\naxes: {{training.seed: [1, 2, 3]}}\n")
    folder = config.parent / "runs" / "seeds"
    command = [*CLI, "sweep", str(sweep), "--python", str(program), "--requeues", "0"]
    printed = cluster.run(*command).splitlines()
    assert [line.split(": job ")[0] for line in printed[:3]] == ["seed1", "seed2", "seed3"]
    assert printed[3] == f"follow: selectron status {folder}"
    for name, end in (("seed1", "finished"), ("seed2", "given up after 0 restarts"), ("seed3", "finished")):
        wait_for(folder / name, lambda name=name, end=end: happened(folder / name)[-1:] == [end])
    (tmp_path / "mended").touch()
    assert len(cluster.run(*command).splitlines()) == 2
    wait_for(folder / "seed2", lambda: happened(folder / "seed2")[-1:] == ["finished"])
    assert [len(jobs_of(folder / f"seed{n}")) for n in (1, 2, 3)] == [1, 2, 1]


def test_what_the_cluster_has_not_is_refused_before_anything_is_written(cluster: SlurmCluster, config: Path) -> None:
    command = [*CLI, "launch", str(config), "run.name=refused", "--partition", "gpux"]
    with pytest.raises(RuntimeError, match=r"--partition: there is no gpux; choose from main"):
        cluster.run(*command)
    assert not (config.parent / "runs" / "refused").exists()


def test_a_mistake_that_only_the_ranks_find_ends_the_job(cluster: SlurmCluster, config: Path) -> None:
    name = "mistaken"
    options = ["--nodes", "2", "--processes-per-node", "2", "data.train_domains=[Nowhere]", f"run.name={name}"]
    cluster.run(*CLI, "launch", str(config), *FIELDS, *options)
    folder = config.parent / "runs" / name
    wait_for(folder, lambda: any(event.startswith("refused") for event in happened(folder)))
    errors = [line for line in jobs_of(folder)[-1].log.read_text().splitlines() if "selectron: error" in line]
    assert len(errors) == 1
    assert "no domain Nowhere in the train split" in errors[0]


def test_what_sinfo_says(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "ask", cluster.run)
    (main,) = slurm.partitions().values()
    assert main == slurm.Partition("main", 2, 0, 2, "infinite", True)
