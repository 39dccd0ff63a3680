"""Sweeps that were edited, or whose data was prepared again, do not reuse old runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from corpora import prepared
from launching import write_config
from ruamel.yaml import YAML

from megatron_ext.cli import main
from megatron_ext.launch import changed_runs, job
from megatron_ext.launch.job import list_jobs
from megatron_ext.run_folder.lock import FOLDER, acquire

SWEEP = "config: base.yaml\nfields: {{training.steps: {steps}}}\naxes: {{training.seed: [1, 2]}}\n"

TRAINS = """
config=$(echo "$*" | grep -o '[^ ]*/config.yaml'); run=$(dirname $(dirname $(dirname $config)))
cp $config $run/config.yaml; echo '{"step": 10}' >$run/metrics.jsonl
"""


@pytest.fixture(scope="module")
def corpora_of(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two prepared data folders. The second has some more documents."""
    folders = [tmp_path_factory.mktemp("corpus") for _ in range(2)]
    return prepared(folders[0], documents=90), prepared(folders[1], documents=99)


@pytest.fixture
def sweep(tmp_path: Path, corpora_of: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Function that calls `selectron sweep`, by default with the arguments that started the runs of the fixture."""
    changed_runs._compute_digests.cache_clear()
    monkeypatch.setattr(job, "PACKAGES", ())  # skip copying the code
    shutil.copytree(corpora_of[0], tmp_path / "data")
    write_config(tmp_path, tmp_path / "data", tmp_path / "runs").rename(tmp_path / "base.yaml")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{TRAINS}\n")
    python.chmod(0o755)
    given = ["--local", "1", "--no-preflight", "--requeues", "0", "--python", str(python)]

    def call(*arguments: str, steps: int = 10) -> int:
        (tmp_path / "sizes.yaml").write_text(SWEEP.format(steps=steps))
        return main(["sweep", str(tmp_path / "sizes.yaml"), *given, *arguments])

    return call


@pytest.fixture
def runs(tmp_path: Path, sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Path:
    """Folder of the sweep's runs, all finished."""
    assert sweep() == 0
    capsys.readouterr()
    return tmp_path / "runs" / "sizes"


def number_of_jobs(runs: Path) -> list[int]:
    return [len(list_jobs(runs / name)) for name in ("seed1", "seed2")]


def test_unchanged_sweep_is_reported_as_finished(
    runs: Path, sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep() == 0
    captured = capsys.readouterr()
    assert captured.out == f"all 2 runs are finished; compare them with: selectron report {runs} --output DIR\n"
    assert captured.err == ""
    assert number_of_jobs(runs) == [1, 1]


@pytest.mark.parametrize(
    ("field", "phrase"),
    [
        ("model.hidden_size=64", "model.hidden_size is 64, was 32"),
        ("training.steps=20", "training.steps is 20, was 10"),
        ("optimizer.weight_decay=0.3", "optimizer.weight_decay is 0.3, was 0.1"),
        ("training.evaluate_every=2", "training.evaluate_every is 2, was 5"),
        ("data.reset_attention=true", "data.reset_attention is true, was false"),
        ("mixers.top1_chunk.chunk_size=32", "mixers.top1_chunk.chunk_size is 32, was 16"),
    ],
)
def test_changed_field_is_named_for_each_run(
    runs: Path, sweep: Callable[..., int], capsys: pytest.CaptureFixture[str], field: str, phrase: str
) -> None:
    more = ["model.pattern=top1_chunk,attention"] if "reset" in field else []  # a mixer of the base refuses it
    if more:
        pytest.importorskip("torch")
        shutil.rmtree(runs)
        assert sweep(*more) == 0
        capsys.readouterr()
    assert sweep(*more, field) == 2
    error = capsys.readouterr().err
    assert f"2 of its runs were started with other settings or data: seed1 ({phrase}" in error
    assert "; seed2 (" in error
    assert "restart them with --restart seed1 --restart seed2" in error
    assert number_of_jobs(runs) == [1, 1]
    assert sweep(*more, field, "--dry-run") == 0  # lists the runs and warns
    captured = capsys.readouterr()
    assert phrase in captured.err
    assert "seed1" in captured.out


@pytest.mark.parametrize(
    "field", ["training.micro_batch_size=1", "run.hang_timeout=60", "training.keep_checkpoints=1", "run.device=auto"]
)
def test_speed_and_location_are_not_compared(runs: Path, sweep: Callable[..., int], field: str) -> None:
    assert sweep(field) == 0
    assert number_of_jobs(runs) == [1, 1]


def test_changed_data_in_the_same_folder_is_named(
    runs: Path,
    tmp_path: Path,
    sweep: Callable[..., int],
    corpora_of: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.move(tmp_path / "data", tmp_path / "moved")
    changed_runs._compute_digests.cache_clear()
    assert sweep(f"data.path={tmp_path}/moved") == 0  # same data in another folder
    shutil.copytree(corpora_of[1], tmp_path / "data")
    capsys.readouterr()
    assert sweep() == 2
    assert "seed1 (other training text, other text to evaluate on, other tokenizer)" in capsys.readouterr().err


def test_restarted_run_keeps_its_old_folder(
    runs: Path, sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (runs / "seed1" / "config.yaml").read_text()
    assert sweep("--restart", "seed1", steps=20) == 2  # the other run differs, too
    assert (runs / "seed1" / "config.yaml").read_text() == before
    capsys.readouterr()
    assert sweep("--restart", "seed1", "--restart", "seed2", steps=20) == 0
    kept = runs / "launch" / "replaced" / "seed1" / "1"
    assert f"seed1: restarts; its old folder is now {kept}\n" in capsys.readouterr().out
    assert (kept / "config.yaml").read_text() == before
    assert YAML().load(runs / "seed1" / "config.yaml")["training"]["steps"] == 20
    assert number_of_jobs(runs) == [1, 1]
    assert sweep(steps=20) == 0
    assert main(["status", str(runs), "--json"]) == 0


def test_running_run_is_not_restarted(
    runs: Path, sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    acquire(runs / "seed1" / FOLDER, "run")
    assert sweep("--restart", "seed1") == 2
    assert "is trained by process" in capsys.readouterr().err
    assert (runs / "seed1" / "metrics.jsonl").exists()


def test_a_run_that_is_not_of_the_sweep(
    runs: Path, sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("--restart", "seed3") == 2
    assert "--restart: there is no run seed3; choose from: seed1, seed2" in capsys.readouterr().err


def test_all_or_none_of_the_restarted_runs_are_moved(
    runs: Path, sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    acquire(runs / "seed2" / FOLDER, "run")
    assert sweep("--restart", "seed1", "--restart", "seed2") == 2
    assert f"{runs}/seed2 is trained by process" in capsys.readouterr().err
    assert (runs / "seed1" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("data.train_domains=null", "data.train_domains=[SECOND, first]"),
        ("data.weights={First: 1, Second: 2}", "data.weights={second: 0.2, First: 0.1}"),
    ],
    ids=["names", "unit"],
)
def test_equivalent_spellings_of_domains_are_equal(
    runs: Path, sweep: Callable[..., int], before: str, after: str
) -> None:
    shutil.rmtree(runs)
    assert sweep(before) == 0
    assert sweep(after) == 0
    assert number_of_jobs(runs) == [1, 1]
    assert sweep(after.replace("first", "First").replace("SECOND, ", "").replace("0.2", "0.4")) == 2


def test_damaged_configuration_does_not_hide_a_changed_sweep(
    runs: Path, sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "seed1" / "config.yaml").write_text("\0")
    assert sweep(steps=20) == 2
    assert "seed1 (training.steps is 20, was 10); seed2 (" in capsys.readouterr().err


def events(runs: Path, what: str) -> None:
    for name in ("seed1", "seed2"):
        (runs / name / "launch" / "1" / "events.tsv").write_text(f"2026-01-01T00:00:00Z\t-\t0\t{what}\n")


def test_future_steps_of_a_stopped_run_may_change(runs: Path, sweep: Callable[..., int]) -> None:
    events(runs, "stopped")
    assert sweep("training.evaluate_every=2", "resilience.on_nonfinite=skip") == 0
    assert number_of_jobs(runs) == [2, 2]
    events(runs, "stopped")


def test_past_steps_of_a_stopped_run_may_not_change(
    runs: Path, sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    events(runs, "stopped")
    assert sweep("optimizer.lr=2e-3") == 2
    assert "seed1 (optimizer.lr is 0.002, was 0.001)" in capsys.readouterr().err


def test_untrained_run_may_be_changed(runs: Path, sweep: Callable[..., int]) -> None:
    events(runs, "refused: optimizer.lr: too high; lower it")
    for name in ("seed1", "seed2"):
        (runs / name / "metrics.jsonl").unlink()
    assert sweep("optimizer.lr=2e-3") == 0
    assert number_of_jobs(runs) == [2, 2]


def test_older_sweeps_are_compared_by_their_configuration(
    runs: Path, sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("seed1", "seed2"):
        (runs / name / "launch" / "1" / "data.json").unlink()
        path = runs / name / "config.yaml"  # as written by a version that lacked some fields
        tree = YAML(typ="safe").load(path)
        del tree["data"]["reset_attention"], tree["resilience"]
        with path.open("w") as file:
            YAML().dump(tree, file)
    assert sweep() == 0
    assert capsys.readouterr().err == (
        "selectron: warning: it is unknown whether the data of seed1, seed2 has changed\n"
    )
    assert sweep(steps=20) == 2
    assert "seed1 (training.steps is 20, was 10)" in capsys.readouterr().err


def test_trunk_is_not_restarted_without_its_branches() -> None:
    from megatron_ext.utils.errors import UserError

    with pytest.raises(UserError, match="--restart: short branches from a checkpoint of long; add --restart short"):
        changed_runs.check_restarts(["long"], {"long": None, "short": None}, {"short": "long"})  # type: ignore[dict-item]
    changed_runs.check_restarts(["long", "short"], {"long": None, "short": None}, {"short": "long"})  # type: ignore[dict-item]


def test_damaged_digests_are_ignored(runs: Path, sweep: Callable[..., int]) -> None:
    for content, code in (("", 0), ("[]", 0), ("\0", 0), (json.dumps({"training text": "3"}), 2)):
        (runs / "seed1" / "launch" / "1" / "data.json").write_text(content)
        assert sweep() == code
