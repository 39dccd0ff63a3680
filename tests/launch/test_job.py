"""Folder of a launched job, and its script run by bash with programs instead of training."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.config.load import load_config
from megatron_ext.config.schema import DataConfig, RunConfig
from megatron_ext.launch.job import Job, format_script, list_jobs, write_job
from megatron_ext.launch.resources import Resources
from megatron_ext.launch.slurm import _count_gpus
from megatron_ext.launch.status import last_metrics, read_job_events, run_folders, status_of, status_table
from megatron_ext.utils import git_info
from megatron_ext.utils.errors import EXIT_STOPPED, UserError

RESOURCES = Resources(nodes=1, job_name="run", requeues=2)


def written(folder: Path, program: str) -> Job:
    """Write a job whose interpreter is a shell program, called as `program -m megatron_ext.cli train ...`."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    return write_job(RunConfig(data=DataConfig(path="data")), folder / "run", RESOURCES, str(python))


def start_job(job: Job) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return subprocess.Popen(["bash", str(job.script)], env=environment, stderr=subprocess.PIPE, text=True)


def wait_for(file: Path) -> None:
    """Wait until a program has created a file."""
    while not file.exists():
        time.sleep(0.01)


def run_to_end(job: Job) -> tuple[int, str, list[str]]:
    """Run the script to its end. Return exit code, output and recorded events."""
    process = start_job(job)
    _, errors = process.communicate(timeout=240)
    return process.returncode, errors, [event.description for event in read_job_events(job)]


def test_run_uses_the_launched_configuration_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/packages/of/the/user")
    job = written(tmp_path, 'echo "$@" > $(dirname "$0")/called; env > $(dirname "$0")/environment')
    assert run_to_end(job) == (0, "", ["begun with 1 processes", "finished"])
    words = (tmp_path / "called").read_text().split()
    assert words == [
        "-m",
        "megatron_ext.cli",
        "train",
        f"{job.folder}/config.yaml",
        "--resume=auto",
        "--processes",
        "1",
    ]
    given = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line)
    assert given["PYTHONPATH"] == f"{job.folder}/code:/packages/of/the/user"
    # The working folder is the source tree, which `python -m` would search first.
    command = [sys.executable, "-c", "import kernels, data_prep, megatron_ext as m; print(m.__file__)"]
    seen = subprocess.run(command, env=given, cwd=git_info.ROOT, capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == f"{job.folder}/code/megatron_ext/__init__.py"
    assert job.number is None


def test_failing_run_is_restarted_up_to_the_limit(tmp_path: Path) -> None:
    code, errors, notes = run_to_end(written(tmp_path, 'echo "$@" >> $(dirname "$0")/called; exit 7'))
    assert code == 7
    assert len(set((tmp_path / "called").read_text().splitlines())) == 1
    assert errors == "selectron: job local ended with exit code 7 after 2 restarts, the maximum number\n"
    failed = ["begun with 1 processes", "ended with exit code 7"]
    assert notes == [*failed, "starts anew", *failed, "starts anew", *failed, "given up after 2 restarts"]


def test_user_error_is_not_retried(tmp_path: Path) -> None:
    code, _, notes = run_to_end(written(tmp_path, "exit 2"))
    assert (code, notes) == (2, ["begun with 1 processes", "refused"])


WAITS = """
trap 'echo $(dirname "$0")/asked; exit 75' USR1 TERM
[ -e "$(dirname "$0")/second" ] && exit 0
touch "$(dirname "$0")/second"
sleep 60 & wait
"""


# Shell commands that send a signal to the script before it knows the process of its first start.
SENDS_EARLY = 'until [ -e "$folder/../../../second" ]; do sleep 0.01; done; [ "$restarts" -gt 0 ] || kill -{} $$'


@pytest.mark.parametrize("is_early", [False, True], ids=["running", "starting"])
@pytest.mark.parametrize(
    ("number", "after"),
    [
        (signal.SIGUSR1, ["ended with exit code 75", "starts anew", "begun with 1 processes", "finished"]),
        (signal.SIGTERM, ["stopped"]),
    ],
)
def test_signal_is_forwarded(tmp_path: Path, number: signal.Signals, after: list[str], is_early: bool) -> None:
    job, name = written(tmp_path, WAITS), number.name.removeprefix("SIG")
    if is_early:
        text = job.script.read_text()
        assert text.count("    running=$!") == 1
        job.script.write_text(text.replace("    running=$!", f"    {SENDS_EARLY.format(name)}\n    running=$!"))
    process = start_job(job)
    wait_for(tmp_path / "second")
    if not is_early:
        process.send_signal(number)
    assert process.wait(timeout=120) == (EXIT_STOPPED if number == signal.SIGTERM else 0)
    assert [event.description for event in read_job_events(job)] == [
        "begun with 1 processes",
        f"asked to stop by {name}",
        *after,
    ]


def test_run_stopped_without_its_job_is_not_finished(tmp_path: Path) -> None:
    """Only the ranks were signalled: the job is neither requeued nor reported as finished."""
    assert run_to_end(written(tmp_path, "exit 75")) == (EXIT_STOPPED, "", ["begun with 1 processes", "stopped"])


FINISHES = """
trap 'exit 0' TERM
touch "$(dirname "$0")/second"
sleep 60 & wait
"""


def test_run_that_finishes_after_a_stop_request_is_finished(tmp_path: Path) -> None:
    job = written(tmp_path, FINISHES)
    process = start_job(job)
    wait_for(tmp_path / "second")
    process.terminate()
    assert process.wait(timeout=120) == 0
    assert [event.description for event in read_job_events(job)][-1] == "finished"


def test_jobs_of_a_run_are_counted(tmp_path: Path) -> None:
    assert list_jobs(tmp_path / "run") == []
    jobs = [written(tmp_path, "exit 0") for _ in range(11)]
    assert list_jobs(tmp_path / "run") == jobs
    assert jobs[-1].folder.name == "11"


def test_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UserError, match=r"run/launch: cannot be written \(Not a directory\); choose another run.dir"):
        written(tmp_path, "exit 0")


def test_container_path_on_the_host(tmp_path: Path) -> None:
    """Paths relative to or below the working folder, below run.dir, below the longest matching mount, or below none."""
    runs, paths = (
        tmp_path / "runs",
        ["data", f"{Path.cwd()}/data", f"{tmp_path}/runs/a", "/in/x", "/in/deep/x", "/else"],
    )
    inside = replace(RESOURCES, container="image.sif", mounts=["/raw:/in:ro", "/far:/in/deep"])
    below = [Path.cwd() / "data"] * 2 + [runs / "a"]
    assert [inside.host_path(path, runs) for path in paths] == [*below, Path("/raw/x"), Path("/far/x"), None]
    assert [RESOURCES.host_path(path, runs) for path in paths[2:]] == [Path(path) for path in paths[2:]]


def test_paths_that_need_quoting_in_a_directive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm parses a directive as a shell does, and % in a log's name as a filename pattern."""
    here, job = tmp_path / "my work", Job(tmp_path / "my runs 50%" / "run" / "launch" / "1")
    here.mkdir()
    monkeypatch.chdir(here)
    lines = format_script(job, RESOURCES, "python3").splitlines()
    assert f"#SBATCH '--output={tmp_path}/my runs 50%%/run/launch/1/job-%j.log'" in lines
    assert f"#SBATCH '--chdir={here}'" in lines


def test_containers(tmp_path: Path) -> None:
    """Script lines that differ with a container: the run folder is mounted, and relative paths keep their meaning."""
    job, here = Job(tmp_path / "runs" / "run" / "launch" / "1"), Path.cwd()

    def settings(image: str) -> list[str]:
        text = format_script(job, replace(RESOURCES, container=image, mounts=["/data", "/raw:/in"]), "python3")
        return re.findall(r"^(?:srun_options|inside)=.*", text, re.MULTILINE)

    assert settings("registry/image:1") == [
        f"srun_options=(--container-image=registry/image:1 --container-mounts={here}:{here},"
        f"{tmp_path}/runs:{tmp_path}/runs,/data:/data,/raw:/in --container-workdir={here})",
        "inside=()",
    ]
    assert settings("image.sif") == [
        "srun_options=()",
        f"inside=(apptainer exec --nv --pwd={here} --bind={here},{tmp_path}/runs,/data,/raw:/in image.sif)",
    ]


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ("(null)", 0),
        ("gpu:8", 8),
        ("gpu:h200:8(S:0-1)", 8),
        ("gpu:a:4,gpu:b:2", 6),
        ("shard:16,gpu:1", 1),
    ],
)
def test_gpu_count_in_slurm_format(resources: str, expected: int) -> None:
    assert _count_gpus(resources) == expected


def test_status(tmp_path: Path) -> None:
    job = written(tmp_path, "exit 7")
    run_to_end(job)
    run = tmp_path / "run"
    record = '{"step": %d, "loss": 2.5, "tokens_per_second": 1234.5}\n'
    (run / "metrics.jsonl").write_text("".join(record % step for step in range(1, 3000)) + '{"step": 3000, "lo')
    assert last_metrics(run) == {"step": 2999, "loss": 2.5, "tokens_per_second": 1234.5}
    assert list(run_folders([tmp_path])) == list(run_folders([run])) == [run]
    _, _, line, failure = status_table([status_of(run)])
    row = [cell.strip() for cell in line.split("|")][1:-1]
    assert row[:7] == ["run", "local", "given up after 2 restarts", "3", "2999 of 1000", "2.5000", "1,234"]
    assert row[7].endswith(" s ago")
    assert row[8].endswith("Z given up after 2 restarts")
    assert failure == f"run failed: given up after 2 restarts; see {job.log}"


def test_folders_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no run that has started"):
        list(run_folders([tmp_path]))
    with pytest.raises(UserError, match="nowhere: is not a folder"):
        list(run_folders([tmp_path / "nowhere"]))


def test_credentials_are_only_in_a_private_file(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The ranks get the whole address. Readers of the run folder do not."""
    address, python = "s3://KEY:hunter2/x@bucket/data", tmp_path / "python"
    python.write_text('#!/bin/sh\nfor word; do echo "$word"; done > $(dirname "$0")/called\n')
    python.chmod(0o755)
    config = RunConfig(data=DataConfig(path=address, cache_dir="/cache"))
    job = write_job(config, tmp_path / "run", RESOURCES, str(python))
    assert run_to_end(job) == (0, "", ["begun with 1 processes", "finished"])
    words = (tmp_path / "called").read_text().splitlines()
    given = [Path(word) for word in words if word.endswith(".yaml")]
    assert given == [job.folder / "config.yaml", job.folder / "private.yaml"]
    monkeypatch.setattr("megatron_ext.config.load.resolve", lambda config, _: config)
    assert load_config(given[0], [str(given[1])], {}).data == config.data
    assert stat.S_IMODE(given[1].stat().st_mode) == 0o600
    holding = [path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert holding == [given[1]]
    assert "path: s3://***@bucket/data" in given[0].read_text()
    other = write_job(RunConfig(data=DataConfig(path="s3://b/d")), tmp_path / "b", RESOURCES, "p")
    assert not (other.folder / "private.yaml").exists()
