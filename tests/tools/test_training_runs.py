"""Runs of `selectron train` as the comparisons start them, with a fake program instead."""

import sys

import training_runs

FAKE = """#!/bin/sh
echo "$@"
echo "threads $OMP_NUM_THREADS"
mkdir -p {runs}/one
printf '{{"loss": 2.5, "tokens": 8}}\\n{{"loss": 2.25, "tokens": 16}}\\n' > {runs}/one/metrics.jsonl
exit {code}
"""


def train(folder, monkeypatch, code):
    program = folder / "python"
    program.write_text(FAKE.format(runs=folder / "runs", code=code))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    settings = ["model.pattern=a*2", "training.steps=2"]
    return training_runs.train(
        folder / "c.yaml", settings, folder, "one", processes=2, environment={"OMP_NUM_THREADS": "3"}
    )


def test_train_returns_steps(tmp_path, monkeypatch):
    assert train(tmp_path, monkeypatch, 0) == [{"loss": 2.5, "tokens": 8}, {"loss": 2.25, "tokens": 16}]
    log_lines = (tmp_path / "one.log").read_text().splitlines()
    assert log_lines == [
        f"-m megatron_ext.cli train {tmp_path}/c.yaml model.pattern=a*2 training.steps=2 "
        f"run.dir={tmp_path}/runs run.name=one --processes 2",
        "threads 3",
    ]


def test_failed_run_returns_no_steps(tmp_path, monkeypatch):
    assert train(tmp_path, monkeypatch, 1) == []
    assert (tmp_path / "runs" / "one" / "metrics.jsonl").exists()


def test_largest_difference():
    assert training_runs.largest_difference([3.0, 2.0, 1.0], [3.0, 2.25, 0.5]) == "5.0e-01"
    assert training_runs.largest_difference([3.0], None) == ""
    assert training_runs.largest_difference([], [3.0]) == ""
