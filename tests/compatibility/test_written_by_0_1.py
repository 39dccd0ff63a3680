"""Data, run folder and checkpoint written by an earlier version, read and continued by this one.

`written_by_0_1/` holds prepared data and a run of six steps that was stopped after the fourth. Do not write it again:
it stands for the files that users have.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from launching import call, records

from megatron_ext import cli
from megatron_ext.parallel.groups import destroy_process_groups

WRITTEN = Path(__file__).parent / "written_by_0_1"
LOSSES = [5.440611839294434, 5.4176812171936035]
"""Losses of steps 5 and 6 when the earlier version trained without a stop."""
TEST_LOSS = 5.399354761466384
"""Loss of the domain Other after step 6, in nats per token."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Working folder in which the earlier run has been continued to its end."""
    folder = tmp_path_factory.mktemp("old") / "here"
    shutil.copytree(WRITTEN, folder)
    with chdir(folder):
        assert call(Path("runs/first/config.yaml"), "--resume") == 0
        yield folder


def test_a_run_continues(folder: Path) -> None:
    steps = records(folder / "runs" / "first")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step["loss"] for step in steps[4:]] == pytest.approx(LOSSES, rel=1e-4)
    evaluations = records(folder / "runs" / "first", "evaluation.jsonl")
    assert evaluations[-1]["loss"] == pytest.approx(TEST_LOSS, rel=1e-4)


def test_a_run_is_evaluated(folder: Path) -> None:
    try:
        assert cli.main(["evaluate", "runs/first", "--output", "results"]) == 0
    finally:
        destroy_process_groups()
    domains = {row["domain"] for row in json.loads((folder / "results" / "domains.json").read_text())["domains"]}
    assert domains == {"First", "Second", "Other"}


def test_a_run_is_shown_and_converted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "runs"]) == 0
    assert "finished" in capsys.readouterr().out
    assert cli.main(["inspect", str(WRITTEN / "runs" / "first")]) == 0
    assert "attention,mamba2" in capsys.readouterr().out
    assert cli.main(["convert", "runs/first", "exported", "--to", "hf"]) == 0
    assert "verified" in capsys.readouterr().err
    assert (folder / "exported" / "model.safetensors").is_file()
