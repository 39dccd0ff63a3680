"""Command `selectron preflight` on several ranks, and its options on `selectron launch`."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import preflight_ranks
import pytest
from test_job import RESOURCES, run_to_end

from megatron_ext.cli import main
from megatron_ext.config.schema import DataConfig, RunConfig
from megatron_ext.launch.job import write_job
from megatron_ext.launch.preflight.checks import PACKAGES, code_digest
from megatron_ext.launch.preflight.limits import parse_size
from megatron_ext.utils import git_info


def free_port() -> int:
    """Return a free port below those that the system assigns, one of which it could assign before rank 0 listens."""
    for port in range(20000 + os.getpid() % 10000, 32000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no free port")


def run_preflight(
    pool: Any, folder: Path, *options: str, processes: int = 4, silent: tuple[int, ...] = ()
) -> tuple[int, str, dict[str, Any]]:
    """Run the pre-flight check. Return exit code and output of the first rank, and the report in the folder."""
    given = ["--folder", str(folder), *options]
    (code, printed), *_ = pool.run(preflight_ranks.preflight, processes, free_port(), given, silent)
    found = folder / "preflight.json"
    return code, printed, json.loads(found.read_text()) if found.exists() else {}


def test_two_nodes_of_two_processes(pool: Any, tmp_path: Path) -> None:
    code, printed, found = run_preflight(pool, tmp_path, "--nodes", "n1,n2")
    assert code == 0, printed
    assert [(one["node"], one["rank"], one["local_rank"]) for one in found["reports"]] == [
        ("n1", 0, 0),
        ("n1", 1, 1),
        ("n2", 2, 0),
        ("n2", 3, 1),
    ]
    # Both processes of each node test a link, with the process of the same local rank.
    assert sorted(link["local_rank"] for link in found["links"]) == [0, 0, 1, 1]
    assert all(link["pair"] == ["n1", "n2"] and link["bandwidth"] > 0 for link in found["links"])
    clock = found["clocks"]["n2"]
    assert abs(clock["ahead"]) <= clock["error"] + 1e-6  # it is the same clock
    assert (tmp_path / "preflight.notes").read_text() == ""
    assert re.search(r"^\| n1 - n2 \| \d", printed, re.MULTILINE)


def test_missing_report_is_attributed_to_the_node(pool: Any, tmp_path: Path) -> None:
    code, printed, found = run_preflight(pool, tmp_path, "--nodes", "n1,n2", "--node-timeout", "100", silent=(3,))
    assert code == 3, printed
    reason = "1 of its 2 processes sent no report within 100 s"
    assert found["verdict"]["bad"] == {"n2": reason}
    assert (tmp_path / "preflight.notes").read_text() == f"bad node n2: {reason}\n"


def test_fault_of_all_nodes_ends_the_job(pool: Any, tmp_path: Path) -> None:
    code, printed, _ = run_preflight(pool, tmp_path, "--nodes", "n1", "--min-disk", "900TB", processes=2)
    assert code == 2
    assert re.search(
        rf"selectron: error: pre-flight: \S+ \w+ free in {tmp_path}, less than 900 TB; repair it, or change", printed
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10GB", 1e10), ("1.5 tb", 1.5e12), ("500M", 5e8), ("12", 12.0), ("3KB", 3e3), ("0", 0.0)],
)
def test_sizes(text: str, expected: float) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("--min-disk", "much", "--min-disk: 'much' is not a size; give one like 10GB"),
        ("--min-tmp", "-1GB", "--min-tmp: '-1GB' is not a size; give one like 10GB"),
        ("--min-gpu-memory", "90", "--min-gpu-memory: '90' is above 1; give a fraction from 0 to 1"),
        ("--max-clock-offset", "x", "--max-clock-offset: 'x' is not a number of 0 or more; give one"),
        ("--min-bandwidth", "nan", "--min-bandwidth: 'nan' is not a number of 0 or more; give one"),
        ("--pair-timeout", "0", "--pair-timeout: '0' is less than a second; give seconds"),
    ],
)
@pytest.mark.parametrize("verb", ["preflight", "launch"])
def test_invalid_limit(
    verb: str, option: str, value: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [verb, f"{option}={value}"]
    if verb == "launch":
        arguments += [str(git_info.ROOT / "examples" / "quickstart.yaml"), f"run.dir={tmp_path}", "--dry-run"]
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"selectron: error: {line}\n"
    assert list(tmp_path.iterdir()) == []


def test_the_script_has_all_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    config = str(git_info.ROOT / "examples" / "quickstart.yaml")
    fields = [f"run.dir={tmp_path}", f"data.path={tmp_path}/data", "--processes-per-node", "2", "--dry-run"]
    assert main(["launch", config, *fields, "--min-disk", "10GB"]) == 0
    (line,) = re.findall(r"^preflight=\((.*)\)$", capsys.readouterr().out, re.MULTILINE)
    assert line.startswith("--min-disk 10GB --min-tmp 250MB ")
    assert line.endswith(" --node-timeout 300")
    assert main(["launch", config, *fields, "--no-preflight", "--resume"]) == 0
    assert "\npreflight=()\n" in capsys.readouterr().out


PROGRAM = """#!/bin/sh
[ "$3" = preflight ] && exec {python} "$@"
echo trained
"""


def test_local_job_checks_this_machine(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PROGRAM.format(python=sys.executable))
    python.chmod(0o755)

    def job(*options: str) -> tuple[int, str, list[str]]:
        resources = replace(RESOURCES, preflight=list(options))
        return run_to_end(write_job(RunConfig(data=DataConfig(path="data")), tmp_path / "run", resources, str(python)))

    code, errors, events = job("--min-tmp", "900TB")
    assert code == 2
    assert re.fullmatch(r"selectron: error: pre-flight: \S+: .* free in \S+, less than 900 TB; repair it, .*\n", errors)
    assert events[0] == "begun with 1 processes"
    assert re.fullmatch(r"bad node \S+: .* less than 900 TB", events[1])
    assert events[2:] == ["refused"]


def test_code_digest_depends_on_the_sources(tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text("x = 1\n")
    first = code_digest(tmp_path)
    (tmp_path / "kernels" / "__pycache__").mkdir()
    (tmp_path / "kernels" / "__pycache__" / "a.pyc").write_text("y")
    assert code_digest(tmp_path) == first
    (tmp_path / "kernels" / "a.py").write_text("x = 2\n")
    assert code_digest(tmp_path) != first
