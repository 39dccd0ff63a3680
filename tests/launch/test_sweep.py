"""Sweeps: parsing, and starting their runs with a shell program instead of training."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

import pytest
from corpora import prepared
from forked import ForkedProcess
from launching import write_config

from megatron_ext.analysis.run_files import SweepRecord, read_sweep_record
from megatron_ext.cli import main
from megatron_ext.config.schema import DataConfig, RunConfig, RunSection
from megatron_ext.config.sweep_file import read_sweep
from megatron_ext.launch.job import acquire_local_lock, list_jobs
from megatron_ext.launch.resources import Resources
from megatron_ext.launch.status import run_folders, status_of, status_table
from megatron_ext.launch.sweep import Sweep
from megatron_ext.utils.errors import EXIT_STOPPED, UserError

SWEEP = """
config: base.yaml
fields: {optimizer.lr: 1e-3}
axes:
  mixer:
    full: {model.pattern: "attention*2"}
    chunk: {model.pattern: "top1_chunk*2", mixers.top1_chunk.chunk_size: 16}
  training.seed: [1, 2]
runs:
  long: {training.steps: 50, optimizer.betas: [0.9, 0.99]}
"""

MATCHED = """
config: a.yaml
axes: {{mixer: {{a: {{model.ffn_hidden_size: 8}}, b: {{model.ffn_hidden_size: 8}}}}}}
match_parameters: {}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "sizes.yaml"
    path.write_text(text)
    return path


def test_sweep_has_a_run_for_each_combination(tmp_path: Path) -> None:
    swept = read_sweep(written(tmp_path, SWEEP))
    assert swept.config == tmp_path / "base.yaml"
    rate, full = "optimizer.lr=0.001", 'model.pattern="attention*2"'
    chunk = ['model.pattern="top1_chunk*2"', "mixers.top1_chunk.chunk_size=16"]
    assert swept.runs == {
        "full-seed1": [rate, full, "training.seed=1"],
        "full-seed2": [rate, full, "training.seed=2"],
        "chunk-seed1": [rate, *chunk, "training.seed=1"],
        "chunk-seed2": [rate, *chunk, "training.seed=2"],
        "long": [rate, "training.steps=50", "optimizer.betas=[0.9, 0.99]"],
    }


def test_axes_with_a_choice(tmp_path: Path) -> None:
    text = """
config: a.yaml
axes:
  optimizer.lr: {choose: best_by validation, values: [3e-4, 1e-3]}
  decay:
    choose: best_by validation
    values: {weak: {optimizer.weight_decay: 0.01, optimizer.lr: 1e-3}, strong: {optimizer.weight_decay: 0.1}}
  choose: {choose: {training.seed: 1}, other: {training.seed: 2}}
"""
    swept = read_sweep(written(tmp_path, text))
    assert swept.chosen == ("optimizer.lr", "optimizer.weight_decay")
    rates, decays, labels = ("lr0.0003", "lr0.001"), ("weak", "strong"), ("choose", "other")
    assert list(swept.runs) == [f"{a}-{b}-{c}" for a in rates for b in decays for c in labels]
    assert swept.runs["lr0.0003-strong-other"] == [
        "optimizer.lr=0.0003",
        "optimizer.weight_decay=0.1",
        "training.seed=2",
    ]
    assert read_sweep(written(tmp_path, SWEEP)).chosen == ()


def test_budgets_in_run_names(tmp_path: Path) -> None:
    swept = read_sweep(written(tmp_path, "config: a.yaml\naxes: {plan.training_flops: [1e17, 3.5e+17, 5]}"))
    assert list(swept.runs) == ["training_flops1e17", "training_flops3.5e17", "training_flops5"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("config: a.yaml", "axes, runs: there are none; give one of the two"),
        (
            "config: a.yaml\naxes: {seed: [1, 2]}",
            "axes.seed: [1, 2] is a list of values, but seed is not a field; name the axis after the field, e.g. ",
        ),
        (
            f"config: a.yaml\naxes: {{mixer: {'long' * 30}}}",
            f'axes.mixer: "{"long" * 14}... is not an axis; give labels',
        ),
        (
            "config: a.yaml\naxes: {mixer: {a: 1}}",
            'axes.mixer: {"a": 1} is not an axis; give labels with their fields below',
        ),
        ("config: a.yaml\naxes: {mixer: []}", "axes.mixer: [] is not an axis"),
        (
            "config: a.yaml\naxes: {a: {x: {}}, b: {y: {}}}\nruns: {x-y: {}}",
            "runs.x-y: there are two runs named x-y; give each run distinct labels",
        ),
        (
            "config: a.yaml\nruns: {launch: {}}",
            "runs.launch: a run named launch, which is reserved for the folder of the sweep's jobs; choose another",
        ),
        ("config: a.yaml\naxes: {training.seed: [1, 1]}", "axes: there are two runs named seed1; give each run "),
        ("axes: {}", "config: missing; write it in the file, or give config=... (it has no default)"),
        (
            "config: a.yaml\nmatch_parameters: {axis: size, to: a}",
            "match_parameters.axis: there is no axis size; give axes, or remove match_parameters",
        ),
        (MATCHED.format("{axis: size, to: a}"), "match_parameters.axis: there is no axis size; choose from: mixer"),
        (MATCHED.format("{axis: mixer, to: c}"), "match_parameters.to: axis mixer has no label c; choose from: a, b"),
        (MATCHED.format("{axis: mixer}"), "match_parameters.to: missing"),
        (MATCHED.format("{axis: mixer, to: a, within: 0}"), "match_parameters.within: 0 is out of range"),
        (
            MATCHED.format("{axis: mixer, to: a}"),
            "axes.mixer.b.model.ffn_hidden_size: 8, but match_parameters determines this width; remove it there, or",
        ),
        ("config: a.yaml\naxis: {}", "axis: no such field; did you mean axes?"),
        (
            "config: a.yaml\naxes: {optimizer.lr: {choose: best, values: [1e-3]}}",
            "axes.optimizer.lr.choose: \"best\" is not one of the choices; choose 'best_by validation'",
        ),
        ("config: a.yaml\naxes: {optimizer.lr: {choose: best_by validation}}", "axes.optimizer.lr.values: missing"),
        (
            "config: a.yaml\naxes: {rate: {choose: best_by validation, values: [1e-3]}}",
            "axes.rate: [0.001] is a list of values, but rate is not a field; name the axis after the field",
        ),
        (
            "config: a.yaml\naxes: {size: {choose: best_by validation, values: {a: {training.steps: 3}}}}",
            "axes.size: training.steps cannot be chosen by a loss; choose among values of optimizer.lr or another",
        ),
        ("config: 3\nruns: {a: {}}", "config: 3 is not text; "),
        (
            "config: a.yaml\nruns: {a: !!set {b}}",
            "runs: contains a value that is not text, ",
        ),
        ("config: a.yaml\nruns: {a: 3}", "runs.a: 3 is not a section of fields; "),
    ],
)
def test_invalid_sweep(tmp_path: Path, text: str, line: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_sweep(path)
    assert str(caught.value).startswith(f"{path}: {line}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "sizes.yaml: no such file; give the path of a sweep, see examples/"),
        ("- a", "sizes.yaml: is not a mapping of sections; start with `config:`, the file that all runs share, see"),
        ("config: a.yaml\nruns: [", "sizes.yaml:2: is not valid YAML "),
        (
            "config: b.yaml\nruns: {a: {}}",
            "sizes.yaml: config: there is no file HERE/b.yaml; give a path relative to the ",
        ),
        ("config: a.yaml\nruns: {a: {}}", "sizes.yaml: run a: HERE/a.yaml: is not valid YAML "),
    ],
)
def test_missing_and_invalid_yaml_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, line: str
) -> None:
    (tmp_path / "a.yaml").write_text("data: [")
    if text is not None:
        written(tmp_path, text)
    assert main(["sweep", str(tmp_path / "sizes.yaml"), "--local", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"selectron: error: {tmp_path}/{line.replace('HERE', str(tmp_path))}")
    assert error.count("\n") == 1


def sweep_of(folder: Path, program: str, names: list[str], off: Mapping[str, str] | None = None) -> Sweep:
    """Build a sweep whose interpreter is a shell program, called as `program -m megatron_ext.cli train CONFIG ...`."""
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nhere=$(dirname "$0"); name=$(basename "$(dirname "$(dirname "$(dirname "$4")")")")\n{program}\n'
    )
    python.chmod(0o755)
    runs = folder / "runs"
    last = {name: str(runs / trunk / "checkpoints" / "step_1000") for name, trunk in (off or {}).items()}
    configs = {
        name: RunConfig(data=DataConfig(path="x"), run=RunSection(dir=str(runs), name=name, branch_from=last.get(name)))
        for name in names
    }
    made = Sweep(runs, configs, Resources(nodes=1, job_name="runs", requeues=0), str(python))
    made.write_run_list()
    return made


# Notes when a run begins and ends. The first run does not end before the second has begun; at most a minute, as the
# runs may be started one by one by mistake. In the pause, more runs would begin than may be concurrent.
COUNTS = """
echo 1 >> $here/changes; turns=0
while [ $(grep -c '^1' $here/changes) -lt 2 ] && [ $turns -lt 600 ]; do sleep 0.1; turns=$((turns + 1)); done
sleep 0.3; echo -1 >> $here/changes
"""


def test_number_of_concurrent_runs(tmp_path: Path) -> None:
    assert sweep_of(tmp_path, COUNTS, list("abcde")).run(1, parallel=2) == 0
    counts = list(accumulate(int(line) for line in (tmp_path / "changes").read_text().split()))
    assert len(counts) == 10
    assert max(counts) == 2


FAILS_ONCE = """
echo $name >> $here/called
[ $name != b ] || [ -e $here/mended ] || exit 3
"""


def test_second_call_starts_the_unfinished_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep, runs = sweep_of(tmp_path, FAILS_ONCE, ["a", "b", "c"]), tmp_path / "runs"
    assert sweep.run(1, parallel=1) == 1
    captured = capsys.readouterr()
    assert f"b: given up after 0 restarts; see {runs}/b/launch/1/job-local.log\n" in captured.out
    assert captured.err == "selectron: 1 of 3 runs are not finished: b\n"
    (tmp_path / "mended").touch()
    assert sweep.run(1, parallel=1) == 0
    assert sweep.run(1, parallel=1) == 0
    assert (tmp_path / "called").read_text().split() == ["a", "b", "c", "b"]
    assert [len(list_jobs(runs / name)) for name in "abc"] == [1, 2, 1]


NOTES_ITS_ORDER = """
echo begin-$name >> $here/order; sleep 0.3; echo end-$name >> $here/order
[ $name != bad ] || exit 3
"""


def test_branch_waits_for_its_trunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    off = {"short": "trunk", "shorter": "trunk", "lost": "bad"}
    sweep = sweep_of(tmp_path, NOTES_ITS_ORDER, [*off, "trunk", "bad"], off)
    assert sweep.run(1, parallel=5) == 1
    order = (tmp_path / "order").read_text().split()
    assert sorted(order) == sorted(
        f"{event}-{name}" for event in ("begin", "end") for name in ("trunk", "bad", "short", "shorter")
    )
    # The two branches may begin and end in any order, and overlap or not.
    assert all(order.index("end-trunk") < order.index(f"begin-{branch}") for branch in ("short", "shorter"))
    captured = capsys.readouterr()
    assert "lost: not started because bad is not finished\n" in captured.out
    assert captured.err == "selectron: 2 of 5 runs are not finished: lost, bad\n"


def test_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match=r"runs: cannot be written \(File exists\); choose another run.dir"):
        sweep_of(tmp_path, "true", ["a"])
    with pytest.raises(
        UserError, match=r"runs/a/launch: cannot be written \(Not a directory\); choose another run.dir"
    ):
        acquire_local_lock(tmp_path / "runs" / "a")


def test_run_trained_by_another_process_is_not_launched(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = base.parent / "runs" / "held"
    held = acquire_local_lock(folder)
    assert held is not None
    try:
        assert main(["launch", str(base), "--local", "1", "run.name=held"]) == 2
    finally:
        os.close(held)
    hint = "wait for it, or stop it with Ctrl-C"
    assert capsys.readouterr().err == f"selectron: error: run.name: another process trains {folder}; {hint}\n"
    assert list_jobs(folder) == []


def test_running_run_is_not_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = sweep_of(tmp_path, "true", ["a", "b"])
    held = acquire_local_lock(tmp_path / "runs" / "a")
    assert held is not None
    assert sweep.run(1, parallel=1) == 1
    assert "a: is already running\n" in capsys.readouterr().out
    os.close(held)
    assert sweep.run(1, parallel=1) == 0


def test_status_of_a_sweep_lists_runs_that_have_not_started(tmp_path: Path) -> None:
    sweep_of(tmp_path, "true", ["b", "a"])
    lines = status_table([status_of(folder) for folder in run_folders([tmp_path / "runs"])])
    assert [[cell.strip() for cell in row.split("|")[1:4]] for row in lines[2:4]] == [
        ["b", "", "not begun"],
        ["a", "", "not begun"],
    ]
    assert lines[4:] == ["", "2 runs: 2 not begun"]


WAITS = """
trap 'exit 75' TERM
touch $here/begun-$name; sleep 60 & wait
"""


def run_two_at_a_time(folder: Path) -> int:
    return sweep_of(folder, WAITS, ["a", "b", "c"]).run(1, parallel=2)


def test_signal_stops_the_runs_and_starts_no_other(tmp_path: Path) -> None:
    process = ForkedProcess(run_two_at_a_time, [tmp_path])
    deadline = time.monotonic() + 120
    while not all((tmp_path / f"begun-{name}").exists() for name in "ab"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == EXIT_STOPPED
    runs = tmp_path / "runs"
    assert {f"{name}: stopped; see {runs}/{name}/launch/1/job-local.log" for name in "ab"} <= set(out.splitlines())
    assert list_jobs(runs / "c") == []


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swept")
    return write_config(folder, prepared(folder), folder / "runs").rename(folder / "base.yaml")


def test_runs_are_listed_before_they_start(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(written(base.parent, SWEEP)), "--dry-run"]) == 0
    rows = [[cell.strip() for cell in row.split("|")[1:4]] for row in capsys.readouterr().out.splitlines()[2:]]
    assert rows[0] == ["full-seed1", "10", "2,560"]
    assert rows[-1] == ["long", "50", "12,800"]
    assert not (base.parent / "runs" / "sizes").exists()


def test_chosen_fields_are_recorded_for_reports(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sweep, "run", lambda *_: 0)
    path = base.parent / "rates.yaml"
    path.write_text("config: base.yaml\naxes: {optimizer.lr: {choose: best_by validation, values: [1e-4, 1e-3]}}")
    assert main(["sweep", str(path), "--local", "1", "--no-preflight"]) == 0
    folder = base.parent / "runs" / "rates"
    assert read_sweep_record(folder) == SweepRecord(["lr0.0001", "lr0.001"], ["optimizer.lr"])
    assert [run.name for run in run_folders([folder])] == ["lr0.0001", "lr0.001"]


def test_invalid_run_is_named_before_any_run_starts(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(base.parent, "config: base.yaml\naxes: {optimizer.lr: [1e-3, -1]}")
    assert main(["sweep", str(path), "--local", "1"]) == 2
    line = f"selectron: error: {path}: run lr-1: optimizer.lr: -1 is out of range; give a value greater than 0\n"
    assert capsys.readouterr().err == line
    assert not (base.parent / "runs" / "sizes").exists()
