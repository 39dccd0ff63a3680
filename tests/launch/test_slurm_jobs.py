"""Command `selectron launch` on a real Slurm of two nodes. Most jobs run a shell program instead of training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from corpora import prepared
from launching import write_config
from slurm_cluster import SlurmCluster, missing
from slurm_runs import (
    FIELDS,
    LAUNCH,
    call,
    job_events,
    number,
    state,
    wait_for,
)

from megatron_ext.launch import slurm
from megatron_ext.launch.job import list_jobs
from megatron_ext.launch.status import read_job_events

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "never")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    started = SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=2, cpus=2)
    started.environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as in a job submitted from torchrun
    yield started
    started.stop()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    return write_config(folder, prepared(folder), folder / "runs")


def program(folder: Path, text: str) -> Path:
    """Write a shell program that replaces training."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_cancelled_job_is_not_requeued(cluster: SlurmCluster, config: Path, tmp_path: Path) -> None:
    folder = config.parent / "runs" / "cancelled"
    waits = program(tmp_path, "while :; do sleep 0.1; done")
    command = ["launch", str(config), "run.name=cancelled", "--python", str(waits), "--no-preflight"]
    call(cluster, *command)
    wait_for(folder, lambda: job_events(folder) and state(cluster, folder) == "RUNNING")
    with pytest.raises(
        RuntimeError, match=r"run.name: \S*cancelled has job \d+ \(running\); cancel it with `selectron"
    ):
        call(cluster, *command, "--resume")
    assert call(cluster, "cancel", str(folder)) == f"cancelled: job {number(folder)} was cancelled\n"
    wait_for(folder, lambda: state(cluster, folder) == "CANCELLED")
    assert "starts anew" not in job_events(folder)


def test_scancel_after_the_time_warning_ends_the_job(cluster: SlurmCluster, config: Path, tmp_path: Path) -> None:
    """scancel sends the same signal as a time limit, here to a program that ends only by SIGKILL."""
    folder = config.parent / "runs" / "warned"
    stuck = program(tmp_path, "trap '' USR1 TERM\necho ready\nwhile :; do sleep 0.1; done")
    options = ["--python", str(stuck), "--nodes", "2", "--processes-per-node", "1", "--time", "10"]
    call(cluster, *LAUNCH, str(config), "run.name=warned", *options)
    wait_for(
        folder, lambda: list_jobs(folder)[0].log.exists() and list_jobs(folder)[0].log.read_text().count("ready") == 2
    )
    cluster.run("scancel", "--batch", "--signal=USR1", number(folder))
    wait_for(folder, lambda: "asked to stop by USR1" in job_events(folder))
    cluster.run("scancel", number(folder))
    wait_for(folder, lambda: "asked to stop by TERM" in job_events(folder))
    found = subprocess.run(["pgrep", "-f", f"^/bin/sh {stuck} "], capture_output=True, text=True, check=True)
    for pid in found.stdout.split():
        os.kill(int(pid), signal.SIGKILL)  # sooner than Slurm does
    wait_for(folder, lambda: state(cluster, folder) == "CANCELLED")
    events = job_events(folder)
    assert not {"its time is up", "starts anew"} & set(events)


FAILS_ONCE = 'case "$*" in *seed2*) [ -e {folder}/mended ] || exit 3 ;; esac'


def sweep_of(folder: Path, config: Path, name: str, text: str, shell: str) -> tuple[Path, list[str]]:
    """Write a sweep with a shell program instead of training. Return its folder and the command."""
    path, sweep = program(folder, shell.format(folder=folder)), config.parent / f"{name}.yaml"
    sweep.write_text(f"config: {config.name}\n{text}\n")
    command = ["sweep", str(sweep), "--python", str(path), "--requeues", "0", "--no-preflight"]
    return config.parent / "runs" / name, command


def test_sweep_submits_the_unfinished_runs(cluster: SlurmCluster, config: Path, tmp_path: Path) -> None:
    """Submit an array, and a second one for the runs that depend on the first."""
    branch = f"{config.parent}/runs/seeds/seed2/checkpoints/step_10"
    text = f"axes: {{training.seed: [1, 2, 3]}}\nruns: {{short: {{run.branch_from: {branch}, training.steps: 15}}}}"
    folder, command = sweep_of(tmp_path, config, "seeds", text, FAILS_ONCE)
    printed = call(cluster, *command).splitlines()
    assert [line.split(": job ")[0] for line in printed[:4]] == ["seed1", "seed2", "seed3", "short"]
    numbers = [line.split(": job ")[1] for line in printed[:4]]
    first = numbers[0].removesuffix("_0")
    assert numbers[:3] == [f"{first}_{task}" for task in range(3)]
    assert numbers[3].endswith("_0, after seed2")
    assert printed[4] == f"follow: selectron status {folder}"
    for name, end in (("seed1", "finished"), ("seed2", "given up after 0 restarts"), ("seed3", "finished")):
        wait_for(folder / name, lambda name=name, end=end: job_events(folder / name)[-1:] == [end])

    def standings() -> list[str]:
        return [run["standing"] for run in json.loads(call(cluster, "status", str(folder), "--json"))]

    wait_for(folder / "short", lambda: standings() == ["finished", "failed", "finished", "stopped"])
    (tmp_path / "mended").touch()
    assert len(call(cluster, *command).splitlines()) == 3
    wait_for(folder / "short", lambda: job_events(folder / "short")[-1:] == ["finished"])
    jobs = {name: list_jobs(folder / name) for name in ("seed1", "seed2", "seed3", "short")}
    assert [len(found) for found in jobs.values()] == [1, 2, 1, 2]
    ended, begun = read_job_events(jobs["seed2"][-1])[-1], read_job_events(jobs["short"][-1])[0]
    assert (ended.description, begun.is_start) == ("finished", True)
    assert ended.time <= begun.time


WAITS = "while [ ! -e {folder}/go ]; do sleep 0.1; done"


def test_interrupted_submission_loses_no_job(cluster: SlurmCluster, config: Path, tmp_path: Path) -> None:
    folder, command = sweep_of(tmp_path, config, "lost", "axes: {training.seed: [1, 2]}", WAITS)
    numbers = [line.split(": job ")[1] for line in call(cluster, *command, "--parallel", "1").splitlines()[:2]]
    jobs = [list_jobs(folder / name)[0] for name in ("seed1", "seed2")]
    wait_for(folder / "seed1", lambda: job_events(folder / "seed1"))
    for job in jobs:  # as if the call had ended right after sbatch
        (job.folder / "job_id").unlink()
    states = [f"seed1: job {numbers[0]} (running)", f"seed2: job {numbers[1]} (pending)"]
    assert call(cluster, *command).splitlines()[:2] == states
    (tmp_path / "go").touch()
    for job in jobs:
        wait_for(job.run, lambda job=job: job_events(job.run)[-1:] == ["finished"])
    assert [len(list_jobs(job.run)) for job in jobs] == [1, 1]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--partition", "gpux"], r"--partition: there is no partition gpux; choose from main"),
        # A limit over all nodes, which sinfo does not show.
        (
            ["--nodes", "2", "--sbatch=--exclude=n1"],
            r"sbatch: refused: .*Requested node configuration is not available",
        ),
    ],
)
def test_missing_resources_are_rejected_before_writing(
    cluster: SlurmCluster, config: Path, options: list[str], line: str, dry: list[str]
) -> None:
    with pytest.raises(RuntimeError, match=line):
        call(cluster, *LAUNCH, str(config), "run.name=refused", *options, *dry)
    assert not (config.parent / "runs" / "refused").exists()


def test_paths_with_special_characters(
    cluster: SlurmCluster, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hostile names of the runs folder and the working folder, which occur in scripts and log names."""
    here = tmp_path / "my work 50%j 'it\"s' $(touch canary) `touch canary` ;touch canary; #\u00e9 ~"
    here.mkdir()
    monkeypatch.chdir(here)
    program(here, "pwd")
    (tmp_path / "base.yaml").write_text(config.read_text())
    (tmp_path / "sizes.yaml").write_text("config: base.yaml\naxes: {training.seed: [1, 2]}\n")
    options = ["run.dir=my runs", "--python", "./program", "--no-preflight"]
    call(cluster, "launch", str(config), "run.name=single", *options)
    call(cluster, "sweep", str(tmp_path / "sizes.yaml"), *options)
    for name in ("single", "sizes/seed1", "sizes/seed2"):
        folder = here / "my runs" / name
        wait_for(folder, lambda folder=folder: job_events(folder)[-1:] == ["finished"])
        assert str(here) in list_jobs(folder)[0].log.read_text().splitlines()
    assert not list(tmp_path.rglob("canary"))


def test_processors_of_a_process_are_its_threads(cluster: SlurmCluster, config: Path, tmp_path: Path) -> None:
    says = program(tmp_path, 'echo "threads: $OMP_NUM_THREADS of $SLURM_CPUS_PER_TASK"')
    options = ["--python", str(says), "--no-preflight", "--cpus-per-task", "2"]
    call(cluster, "launch", str(config), "run.name=threads", *options)
    folder = config.parent / "runs" / "threads"
    wait_for(folder, lambda: job_events(folder)[-1:] == ["finished"])
    assert "threads: 2 of 2" in list_jobs(folder)[0].log.read_text().splitlines()


def test_user_error_found_by_the_ranks_ends_the_job(cluster: SlurmCluster, config: Path) -> None:
    name = "mistaken"
    options = ["--nodes", "2", "--processes-per-node", "1", "data.train_domains=[Nowhere]", f"run.name={name}"]
    call(cluster, *LAUNCH, str(config), *FIELDS, *options)
    folder = config.parent / "runs" / name
    wait_for(folder, lambda: any(event.startswith("refused") for event in job_events(folder)))
    errors = [line for line in list_jobs(folder)[-1].log.read_text().splitlines() if "selectron: error" in line]
    assert len(errors) == 1
    assert "no domain Nowhere in the train split" in errors[0]


def test_partitions_from_sinfo(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "run_command", cluster.run)
    (main,) = slurm.partitions().values()
    assert main == slurm.Partition("main", 2, 0, 2, "infinite", True)
