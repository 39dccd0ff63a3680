"""Command `selectron launch` on a real Slurm of two nodes with two processes each, compared with undisturbed runs."""

from __future__ import annotations

import json
import os
import signal
import site
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from corpora import prepared
from launching import ROOT, curve, records, write_config
from slurm_cluster import PATH, SlurmCluster, missing
from slurm_runs import (
    CLI,
    FIELDS,
    LAUNCH,
    STEPS,
    finished,
    happened,
    launched,
    number,
    ranks_of,
    release,
    state,
    wait_for,
    wait_for_step,
)

from megatron_ext.launch import slurm
from megatron_ext.launch.job import jobs_of
from megatron_ext.launch.status import events_of
from megatron_ext.run_folder.launch_events import read_events

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


@pytest.fixture(scope="module")
def undisturbed(cluster: SlurmCluster, config: Path) -> Path:
    """Folder of a finished, undisturbed run."""
    return finished(cluster, launched(cluster, config, "undisturbed", processes_per_node=1))


def test_a_killed_rank(cluster: SlurmCluster, config: Path, undisturbed: Path) -> None:
    folder = launched(cluster, config, "killed_rank", processes_per_node=1)
    wait_for_step(folder, 5)
    ranks = ranks_of(folder)
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    finished(cluster, folder)
    begun, ended, *again = happened(folder)
    assert begun == "begun on n1,n2"
    assert ended in (
        "ended with exit code 137",
        "ended with exit code 143",
    )  # srun's code: of the rank, or of one killed next
    assert again == ["starts anew", begun, "finished"]
    assert curve(folder) == curve(undisturbed)
    (last,) = cluster.run(*CLI, "logs", str(folder), "--lines", "1").splitlines()
    assert last.endswith(f"finished: {STEPS} steps, {STEPS * 256:,} tokens, in {folder}")
    row = cluster.run(*CLI, "status", str(folder)).splitlines()[2]
    assert [cell.strip() for cell in row.split("|")][1:6] == [
        "killed_rank",
        number(folder),
        "completed",
        "2",
        f"{STEPS} of {STEPS}",
    ]


def test_the_template_by_hand(
    cluster: SlurmCluster, config: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run `sbatch slurm/train.sbatch` unmodified, with Selectron on the nodes and a signal before the time limit."""
    (tmp_path / "python3").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)  # folder of events and log
    # A link to the interpreter of a virtual environment does not find the environment by itself.
    found = [f"PATH={tmp_path}:{PATH}", f"PYTHONPATH={ROOT}:{':'.join(site.getsitepackages())}"]
    options = ["--parsable", "--nodes=2", "--ntasks-per-node=1", str(ROOT / "slurm" / "train.sbatch"), str(config)]
    job = cluster.run("env", *found, "sbatch", *options, *FIELDS, "run.name=by_hand").strip()
    folder = config.parent / "runs" / "by_hand"

    def notes() -> list[str]:
        return [event.what for event in read_events(tmp_path)]

    def is_past(condition: Callable[[], object]) -> None:
        end = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < end, (notes(), (tmp_path / f"selectron-{job}.log").read_text())
            time.sleep(0.1)

    is_past(lambda: len(records(folder)) >= 5)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    is_past(lambda: release(cluster, job))
    is_past(lambda: notes()[-1:] == ["finished"])
    begun, asked, ended, *again = notes()
    assert [begun, asked, *again] == ["begun on n1,n2", "asked to stop by USR1", "starts anew", begun, "finished"]
    assert ended == "ended with exit code 75"  # stopped; srun itself does not report this code
    assert curve(folder) == curve(undisturbed)


def test_a_job_that_is_cancelled_does_not_start_anew(cluster: SlurmCluster, config: Path) -> None:
    folder = config.parent / "runs" / "cancelled"
    fields = [*FIELDS, "training.steps=100000", "run.name=cancelled"]
    cluster.run(*LAUNCH, str(config), *fields)
    wait_for_step(folder, 3)
    with pytest.raises(RuntimeError, match=r"run.name: \S*cancelled has job \d+ \(running\); cancel it with"):
        cluster.run(*LAUNCH, str(config), *fields, "--resume")
    assert cluster.run(*CLI, "cancel", str(folder)) == f"cancelled: job {number(folder)} was cancelled\n"
    wait_for(folder, lambda: state(cluster, folder) == "CANCELLED")
    assert "starts anew" not in happened(folder)


FAILS_ONCE = """#!/bin/sh
case "$*" in *seed2*) [ -e {folder}/mended ] || exit 3 ;; esac
"""


def sweep_of(folder: Path, config: Path, name: str, text: str, program: str) -> tuple[Path, list[str]]:
    """Write a sweep with a shell program instead of training. Return its folder and the command."""
    path, sweep = folder / "program", config.parent / f"{name}.yaml"
    path.write_text(program.format(folder=folder))
    path.chmod(0o755)
    sweep.write_text(f"config: {config.name}\n{text}\n")
    command = [*CLI, "sweep", str(sweep), "--python", str(path), "--requeues", "0", "--no-preflight"]
    return config.parent / "runs" / name, command


def test_a_sweep_submits_what_is_not_finished(cluster: SlurmCluster, config: Path, tmp_path: Path) -> None:
    """Submit an array, and a second one for the runs that depend on the first."""
    branch = f"{config.parent}/runs/seeds/seed2/checkpoints/step_10"
    text = f"axes: {{training.seed: [1, 2, 3]}}\nruns: {{short: {{run.branch_from: {branch}, training.steps: 15}}}}"
    folder, command = sweep_of(tmp_path, config, "seeds", text, FAILS_ONCE)
    printed = cluster.run(*command).splitlines()
    assert [line.split(": job ")[0] for line in printed[:4]] == ["seed1", "seed2", "seed3", "short"]
    numbers = [line.split(": job ")[1] for line in printed[:4]]
    first = numbers[0].removesuffix("_0")
    assert numbers[:3] == [f"{first}_{task}" for task in range(3)]
    assert numbers[3].endswith("_0, after seed2")
    assert printed[4] == f"follow: selectron status {folder}"
    for name, end in (("seed1", "finished"), ("seed2", "given up after 0 restarts"), ("seed3", "finished")):
        wait_for(folder / name, lambda name=name, end=end: happened(folder / name)[-1:] == [end])

    def standings() -> list[str]:
        return [run["standing"] for run in json.loads(cluster.run(*CLI, "status", str(folder), "--json"))]

    wait_for(folder / "short", lambda: standings() == ["finished", "failed", "finished", "stopped"])
    (tmp_path / "mended").touch()
    assert len(cluster.run(*command).splitlines()) == 3
    wait_for(folder / "short", lambda: happened(folder / "short")[-1:] == ["finished"])
    jobs = {name: jobs_of(folder / name) for name in ("seed1", "seed2", "seed3", "short")}
    assert [len(found) for found in jobs.values()] == [1, 2, 1, 2]
    ended, begun = events_of(jobs["seed2"][-1])[-1], events_of(jobs["short"][-1])[0]
    assert (ended.what, begun.is_start) == ("finished", True)
    assert ended.time <= begun.time


WAITS = """#!/bin/sh
while [ ! -e {folder}/go ]; do sleep 0.1; done
"""


def test_a_call_that_was_stopped_loses_no_job(cluster: SlurmCluster, config: Path, tmp_path: Path) -> None:
    folder, command = sweep_of(tmp_path, config, "lost", "axes: {training.seed: [1, 2]}", WAITS)
    numbers = [line.split(": job ")[1] for line in cluster.run(*command, "--parallel", "1").splitlines()[:2]]
    jobs = [jobs_of(folder / name)[0] for name in ("seed1", "seed2")]
    wait_for(folder / "seed1", lambda: happened(folder / "seed1"))
    for job in jobs:  # as if the call had ended right after sbatch
        (job.folder / "job_id").unlink()
    states = [f"seed1: job {numbers[0]} (running)", f"seed2: job {numbers[1]} (pending)"]
    assert cluster.run(*command).splitlines()[:2] == states
    (tmp_path / "go").touch()
    for job in jobs:
        wait_for(job.run, lambda job=job: happened(job.run)[-1:] == ["finished"])
    assert [len(jobs_of(job.run)) for job in jobs] == [1, 1]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--partition", "gpux"], r"--partition: there is no gpux; choose from main"),
        # A limit over all nodes, which sinfo does not show.
        (
            ["--nodes", "2", "--sbatch=--exclude=n1"],
            r"sbatch: refused: .*Requested node configuration is not available",
        ),
    ],
)
def test_what_the_cluster_has_not_is_refused_before_anything_is_written(
    cluster: SlurmCluster, config: Path, options: list[str], line: str, dry: list[str]
) -> None:
    with pytest.raises(RuntimeError, match=line):
        cluster.run(*LAUNCH, str(config), "run.name=refused", *options, *dry)
    assert not (config.parent / "runs" / "refused").exists()


def test_paths_that_a_shell_or_slurm_would_take_for_more(
    cluster: SlurmCluster, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hostile names of the runs folder and the working folder, which occur in scripts and log names."""
    here = tmp_path / "my work 50%j 'it\"s' $(touch canary) `touch canary` ;touch canary; #\u00e9 ~"
    here.mkdir()
    monkeypatch.chdir(here)
    program = here / "program"
    program.write_text("#!/bin/sh\npwd\n")
    program.chmod(0o755)
    (tmp_path / "base.yaml").write_text(config.read_text())
    (tmp_path / "sizes.yaml").write_text("config: base.yaml\naxes: {training.seed: [1, 2]}\n")
    options = ["run.dir=my runs", "--python", "./program", "--no-preflight"]
    cluster.run(*CLI, "launch", str(config), "run.name=single", *options)
    cluster.run(*CLI, "sweep", str(tmp_path / "sizes.yaml"), *options)
    for name in ("single", "sizes/seed1", "sizes/seed2"):
        folder = here / "my runs" / name
        wait_for(folder, lambda folder=folder: happened(folder)[-1:] == ["finished"])
        assert str(here) in jobs_of(folder)[0].log.read_text().splitlines()
    assert not list(tmp_path.rglob("canary"))


def test_processors_of_a_process_are_its_threads(cluster: SlurmCluster, config: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "threads: $OMP_NUM_THREADS of $SLURM_CPUS_PER_TASK"\n')
    program.chmod(0o755)
    options = ["--python", str(program), "--no-preflight", "--cpus-per-task", "2"]
    cluster.run(*CLI, "launch", str(config), "run.name=threads", *options)
    folder = config.parent / "runs" / "threads"
    wait_for(folder, lambda: happened(folder)[-1:] == ["finished"])
    assert "threads: 2 of 2" in jobs_of(folder)[0].log.read_text().splitlines()


def test_a_mistake_that_only_the_ranks_find_ends_the_job(cluster: SlurmCluster, config: Path) -> None:
    name = "mistaken"
    options = ["--nodes", "2", "--processes-per-node", "2", "data.train_domains=[Nowhere]", f"run.name={name}"]
    cluster.run(*LAUNCH, str(config), *FIELDS, *options)
    folder = config.parent / "runs" / name
    wait_for(folder, lambda: any(event.startswith("refused") for event in happened(folder)))
    errors = [line for line in jobs_of(folder)[-1].log.read_text().splitlines() if "selectron: error" in line]
    assert len(errors) == 1
    assert "no domain Nowhere in the train split" in errors[0]


def test_what_sinfo_says(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "ask", cluster.run)
    (main,) = slurm.partitions().values()
    assert main == slurm.Partition("main", 2, 0, 2, "infinite", True)
