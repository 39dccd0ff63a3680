"""Generated scripts, checked by shellcheck. `test_declared_cluster.py` checks them with Slurm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.config.schema import DataConfig, RunConfig
from megatron_ext.launch.array import write_array
from megatron_ext.launch.job import write_job
from megatron_ext.launch.resources import Resources

SHELLCHECK = Path(sys.executable).with_name("shellcheck")


@pytest.mark.skipif(not SHELLCHECK.exists(), reason="shellcheck is not installed beside this Python")
@pytest.mark.parametrize("container", [None, "registry/image:1", "image.sif"])
@pytest.mark.parametrize("preflight", [[], ["--min-disk", "1 GB"]])
def test_generated_scripts_are_valid(tmp_path: Path, container: str | None, preflight: list[str]) -> None:
    given = Resources(
        nodes=2,
        gpus_per_node=8,
        cpus_per_task=12,
        job_name="sizes",
        container=container,
        mounts=["/my data:/in"],
        preflight=preflight,
    )
    runs = tmp_path / "it's my runs"
    jobs = [write_job(RunConfig(data=DataConfig(path="data")), runs / name, given, "python3") for name in "ab"]
    array = write_array(runs, jobs, given, parallel=1, after="7")
    done = subprocess.run(
        [SHELLCHECK, *(job.script for job in jobs), array.script], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("", 0)
