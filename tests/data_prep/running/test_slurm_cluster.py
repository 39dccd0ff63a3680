"""The command `selectron prepare --executor slurm` on a real Slurm cluster of two nodes with one core each."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from prep_fakes import options
from slurm_cluster import FAILING, SlurmCluster, missing

from data_prep.prepare import prepare
from data_prep.stages import Filtering

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "never")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[SlurmCluster]:
    started = SlurmCluster(
        tmp_path_factory.mktemp("slurm") / "cluster", nodes=2, cpus=1, slurmd_timeout=FAILING, kill_wait=2
    )
    yield started
    started.stop()


def submit(cluster: SlurmCluster, source: Path, output: Path, tokenizer: Path, *more: str) -> str:
    """Run `selectron prepare` with the options of `prep_fakes.options` and more, and return its output."""
    data = ["--input", str(source), "--output", str(output), "--tokenizer", str(tokenizer), "--tasks", "2"]
    domains = ["--train-domains", "C4,CommonCrawl", "--test-domains", "ArXiv"]
    sizes = ["--validation-fraction", "0.2", "--shard-tokens", "700"]
    execution = ["--executor", "slurm", "--slurm-partition", "main", "--slurm-time", "5:00", "--workers", "2"]
    return cluster.run(sys.executable, "-m", "megatron_ext.cli", "prepare", *data, *domains, *sizes, *execution, *more)


def jobs(cluster: SlurmCluster, state: str) -> list[list[str]]:
    """Return id, name and node of the jobs in a state. Pending jobs have no node."""
    listed = cluster.run("squeue", "--noheader", "--array", f"--states={state}", "--format=%i|%j|%N")
    return [line.split("|") for line in listed.splitlines()]


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def running(cluster: SlurmCluster, name: str) -> list[list[str]]:
    return [job for job in jobs(cluster, "running") if job[1] == name]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_failing_task_ends_the_chain(cluster, records, tmp_path, tokenizer_file):
    with (records / "b.jsonl").open("a") as file:
        file.write("{broken\n")
    output = tmp_path / "out"
    submit(cluster, records, output, tokenizer_file)
    wait_for(lambda: not jobs(cluster, "pending,running,completing"))
    last_lines = [path.read_text().splitlines()[-1] for path in (tmp_path / "out.slurm" / "exact_signatures").iterdir()]
    (why,) = [line for line in last_lines if line.startswith("selectron: error: ")]
    assert re.search(r"b\.jsonl:46: not JSON .*; repair it or pass --on-error skip$", why)
    assert not output.exists()
    for later in ("exact_pairs", "tokenising"):
        assert not list((tmp_path / "out.slurm" / later).iterdir())


# Python imports this module at its start. On the second node no task ends before the node fails.
HOLDS = """
import socket, time
while socket.gethostname() == "n2":
    time.sleep(0.1)
"""


def test_result_after_a_node_failure(cluster, records, tmp_path, tokenizer_file):
    """Use a single stage, because no node fails in the others and each of their jobs starts Python again."""
    one_pass = Filtering(cleaning=None, duplicates="keep", overlap=None)
    prepare(options(records, tmp_path / "local", tokenizer_file, tasks=2, filtering=one_pass))
    output, held = tmp_path / "out", tmp_path / "held"
    held.mkdir()
    (held / "sitecustomize.py").write_text(HOLDS)
    path = os.pathsep.join(filter(None, [str(held), cluster.environment.get("PYTHONPATH")]))
    with patch.dict(cluster.environment, PYTHONPATH=path):
        submit(cluster, records, output, tokenizer_file, "--no-clean", "--duplicates", "keep", "--decontaminate", "off")
    wait_for(lambda: any(node == "n2" for _, _, node in running(cluster, "prepare-tokenising")))
    (task,) = [job for job, _, node in running(cluster, "prepare-tokenising") if node == "n2"]
    cluster.kill_node("n2")

    def is_there() -> bool:
        """Return whether the output exists. Restart the requeued task, which Slurm may hold for two minutes."""
        if task in [job for job, _, _ in jobs(cluster, "pending")]:
            cluster.run("scontrol", "update", f"JobId={task}", "StartTime=now", check=False)
        return output.exists()

    wait_for(is_there)
    assert "Restarts=1 " in cluster.run("scontrol", "show", "job", task)
    assert contents(output) == contents(tmp_path / "local")
