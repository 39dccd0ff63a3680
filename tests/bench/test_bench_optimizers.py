"""Benchmark of optimizers: each one runs in every round, and the table follows from the numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.bench.optimizers import run as optimizers
from megatron_ext.bench.steps import TimedRun
from megatron_ext.cli import main
from megatron_ext.config.schema import OptimizerConfig, RunConfig
from megatron_ext.platform.device import Platform

CPU = Platform(torch.device("cpu"), "gloo")


def test_optimizers_alternate(one_process: Any, small_run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    train = TimedRun.train

    def recording(self: TimedRun) -> None:
        turns.append(self._config.optimizer.sharding)
        train(self)

    monkeypatch.setattr(TimedRun, "train", recording)
    names = ("none", "megatron")
    configs = {name: replace(small_run, optimizer=OptimizerConfig(sharding=name)) for name in names}
    found = optimizers.measure(configs, 100, one_process, CPU, rounds=2, steps=1)
    assert {name: len(seconds) for name, seconds in found.items()} == {"none": 2, "megatron": 2}
    assert all(second > 0 for seconds in found.values() for second in seconds)
    none, megatron = ["none"], ["megatron"]
    assert turns == 3 * none + 3 * megatron + 2 * none + 2 * megatron + 2 * megatron + 2 * none


def test_timed_step_updates_parameters(one_process: Any, small_run: RunConfig) -> None:
    run = TimedRun(small_run, 100, one_process, CPU)
    (chunk,) = run.trainer.optimizer.chunks
    before = [parameter.detach().clone() for parameter in chunk.parameters()]
    assert run.time_call(run.train) > 0
    assert run.step == 1
    assert all((a != b).any() for a, b in zip(before, chunk.parameters(), strict=True))


REPORT = optimizers.OptimizerReport(
    name="small",
    overrides=("a=1",),
    processes=2,
    machine={"torch": "2"},
    steps=10,
    seconds={"megatron": [0.2, 0.25, 0.4], "zero1": [0.22, 0.25, 0.36]},
)


def test_the_table_by_hand(tmp_path: Path) -> None:
    REPORT.write(tmp_path)
    text = (tmp_path / "optimizers.md").read_text()
    assert text == REPORT.markdown()
    assert "`small a=1`, 2 processes. Medians of 3 rounds of 10 steps." in text
    assert "| megatron | 250.0 | 1.000 | 1.000 to 1.000 |" in text
    assert "| zero1 | 250.0 | 1.000 | 0.900 to 1.100 |" in text
    raw = json.loads((tmp_path / "optimizers.json").read_text())
    assert raw["beside_first"]["zero1"] == pytest.approx([1.1, 1.0, 0.9])
    assert raw["seconds"] == REPORT.seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds: 0 is less than 1"),
        (["--steps", "0"], "--steps: 0 is less than 1"),
        (["--optimizers", ","], "--optimizers: no optimizer is given"),
        (["--optimizers", "zero9"], 'optimizer.sharding: "zero9" is not one of the choices'),
    ],
)
def test_invalid_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "optimizers", *options, "examples/110m_2k.yaml", "data.path=none"]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
