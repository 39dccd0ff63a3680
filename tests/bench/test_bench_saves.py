"""Benchmark of checkpoints: measured sizes equal those on disk, and the table follows from the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.bench.checkpoints import report
from megatron_ext.bench.checkpoints.run import WARM_UP_STEPS, CheckpointBenchmark, Measured, Save
from megatron_ext.cli import main
from megatron_ext.config.schema import RunConfig
from megatron_ext.platform.device import Platform

CPU = Platform(torch.device("cpu"), "gloo")


def test_checkpoint_measurements(one_process: Any, small_run: RunConfig, tmp_path: Path) -> None:
    found = CheckpointBenchmark(small_run, 100, one_process, CPU, tmp_path).measure(steps=1, saves=2)
    # fp32 parameters, the optimizer's main parameters and two moments, plus the overhead of torch.save.
    assert 16 * found.parameters < found.size < 16 * found.parameters + 200_000
    assert len(found.saves) == 2
    for save in [found.first, *found.saves]:
        assert len(save.steps) >= 2  # one step writes the files, another completes the checkpoint
        assert 0 < save.stall < save.whole_after
        assert save.whole_after > sum(save.steps)
    numbers = (found.step, found.at_once, found.floor_write, found.check, found.load, found.floor_read)
    assert all(seconds > 0 for seconds in numbers)
    # The newest checkpoint of each kind exists, and the plain files are as large as the checkpoint.
    (whole,) = (tmp_path / "at_once").glob("step_*")
    assert sum(file.stat().st_size for file in whole.iterdir()) == found.size
    assert len(list((tmp_path / "later").glob("step_*"))) == 1
    for plain in (tmp_path / "plain").iterdir():
        assert plain.stat().st_size == (whole / plain.name).stat().st_size
    assert WARM_UP_STEPS == 2


MEASURED = Measured(
    parameters=1000,
    size=4_000_000_000,
    step=0.5,
    first=Save(stall=0.25, steps=[0.5], whole_after=1.0),
    saves=[
        Save(stall=0.01, steps=[0.6, 0.5], whole_after=2.0),
        Save(stall=0.03, steps=[0.5, 0.55], whole_after=4.0),
        Save(stall=0.02, steps=[0.5, 0.7], whole_after=3.0),
    ],
    at_once=2.0,
    floor_write=1.0,
    check=0.5,
    load=4.0,
    floor_read=0.25,
)


def test_shares_and_speeds_by_hand() -> None:
    assert report.derived(MEASURED) == pytest.approx(
        {
            "stall_ms": 20.0,
            "stall_of_a_step": 0.04,
            "worst_stall_of_a_step": 0.06,
            "first_stall_of_a_step": 0.5,
            "slowed_by_of_a_step": 0.2,  # 0.1, 0.05 and 0.2 s
            "at_once_of_a_step": 4.0,
            "whole_after_s": 3.0,
            "save_gb_per_s": 2.0,
            "floor_write_gb_per_s": 4.0,
            "check_gb_per_s": 8.0,
            "load_gb_per_s": 1.0,
            "floor_read_gb_per_s": 16.0,
        }
    )


def test_checkpoint_report(tmp_path: Path) -> None:
    done = report.CheckpointReport(
        name="small", overrides=("a=1",), processes=2, machine={"torch": "2"}, measured=MEASURED
    )
    done.write(tmp_path)
    raw = json.loads((tmp_path / "checkpoints.json").read_text())
    assert raw["measured"]["saves"][1]["stall"] == 0.03
    assert raw["derived"]["stall_of_a_step"] == pytest.approx(0.04)
    text = (tmp_path / "checkpoints.md").read_text()
    assert text == done.markdown()
    assert "| stall of a save | 20.0 ms, 4.0 % of a step |" in text
    assert "`small a=1`, 2 processes, 4,000 MB per checkpoint. Medians of 3 saves." in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--saves", "0"], "--saves: 0 is less than 1"),
        (["--steps", "-1"], "--steps: -1 is less than 1"),
        (["--vocabulary", "0"], "--vocabulary: 0 is less than 1"),
        ([], "none.yaml"),
    ],
)
def test_invalid_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "checkpoints", *options, "none.yaml"]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
