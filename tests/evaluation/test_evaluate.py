"""The command `selectron evaluate` on a run that two processes trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import ROOT, call_command, environment, write_config
from ruamel.yaml import YAML

from megatron_ext.analysis.token_classes import read_class_losses, read_classes_file
from megatron_ext.checkpoint.folder import CheckpointFolder, Progress, Retention
from megatron_ext.cli import main


def _evaluate_in_two_processes(*arguments: str) -> str:
    command = [sys.executable, "-m", "megatron_ext.cli", "evaluate", *arguments, "--processes", "2"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _in_training(run: Path) -> dict[tuple[str, str], float]:
    records = [json.loads(line) for line in (run / "evaluation.jsonl").open()]
    return {(r["domain"], r["split"]): r["loss"] for r in records if r["step"] == 4}


def _losses(path: Path) -> dict[tuple[str, str], float]:
    return {(domain["domain"], domain["split"]): domain["loss"] for domain in json.loads(path.read_text())["domains"]}


@pytest.mark.slow
def test_losses_are_those_of_training(run: Path, tmp_path: Path) -> None:
    """The run evaluated three windows per domain at its end, with TP2 and sequence parallelism."""
    output = ["--output", str(tmp_path / "out")]
    printed = _evaluate_in_two_processes(str(run), "domains.sequences=3", *output, "parallel.pipeline=2")
    assert _losses(tmp_path / "out" / "domains.json") == pytest.approx(_in_training(run), abs=2e-6)
    tables = [(tmp_path / "out" / f"{name}.md").read_text() + "\n" for name in ("domains", "token_classes")]
    assert printed == "".join(tables)
    recorded, read = read_class_losses(run), read_classes_file(tmp_path / "out" / "token_classes.json")
    assert [(one.step, one.split, one.domain, one.names) for one in recorded] == [
        (one.step, one.split, one.domain, one.names) for one in read
    ]
    for ours, theirs in zip(recorded, read, strict=True):
        assert np.array_equal(ours.documents, theirs.documents)
        assert np.array_equal(ours.tokens, theirs.tokens)
        assert ours.nats == pytest.approx(theirs.nats, rel=1e-5, abs=2e-4)


@pytest.mark.slow
def test_losses_of_one_process_with_data_at_an_address_are_those_of_training(run: Path, tmp_path: Path) -> None:
    data = YAML(typ="safe").load(run / "config.yaml")["data"]["path"]
    address = [f"data.path=file://{data}", f"data.cache_dir={tmp_path / 'cache'}"]
    assert call_command("evaluate", str(run), "domains.sequences=3", "--output", str(tmp_path / "out"), *address) == 0
    assert _losses(tmp_path / "out" / "domains.json") == pytest.approx(_in_training(run), abs=2e-6)
    assert list((tmp_path / "cache").glob("*/test/Other/*.tar"))


@pytest.mark.slow
def test_a_checkpoints_folder_says_its_step(run: Path) -> None:
    assert call_command("evaluate", str(run / "checkpoints" / "step_2"), "domains.sequences=3") == 0
    results = run / "evaluation" / "step_2" / "domains.json"
    assert json.loads(results.read_text())["step"] == 2
    assert _losses(results) != pytest.approx(_in_training(run), abs=1e-3)


@pytest.mark.slow
def test_what_suites_find_stands_in_the_report(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run two suites at once into the run's own folder, and read the results in the report."""
    options = ["retrieval.lengths=[64]", "retrieval.tasks=[mqar, induction]", "retrieval.depths=[0.5]"]
    assert call_command("evaluate", str(run), "--suite", "domains,retrieval", *options, "retrieval.samples=3") == 0
    results = run / "evaluation" / "step_4"
    assert capsys.readouterr().out == "".join(
        (results / f"{suite}.md").read_text() + "\n" for suite in ("domains", "token_classes", "retrieval")
    )
    found = json.loads((results / "retrieval.json").read_text())
    assert (found["run"], found["step"]) == ("run", 4)
    assert {(one["task"], one["length"], one["samples"]) for one in found["by_length"]} == {
        ("mqar", 64, 3),
        ("induction", 64, 3),
    }
    assert [(one["task"], one["index"]) for one in found["records"]] == [
        (task, index) for task in ("mqar", "induction") for index in range(3)
    ]
    assert (results / "retrieval.png").read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(run), "--output", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "index.html").read_text()
    for one in json.loads((results / "domains.json").read_text())["domains"]:
        assert one["bits_per_byte"] is not None
        assert f'<td data-value="{one["loss"]}">{one["loss"]:.4f} ' in page
        assert f'<td data-value="{one["bits_per_byte"]}">{one["bits_per_byte"]:.4f}</td>' in page
    for one in found["by_length"]:
        assert f"{one['task']}, 64 tokens</th>" in page
        assert f'<td data-value="{one["score"]}">{100 * one["score"]:.1f} ' in page


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["retrieval.tasks=[passkey]", "retrieval.lengths=[4096]"],
            "retrieval.lengths: 4096 does not fit passkey: the model supports at most 64 tokens",
        ),
        (["retrieval.lengths=[64]", "retrieval.haystack=/nowhere"], "retrieval.haystack: /nowhere does not exist"),
        (["retrieval.tasks=[mqar]", "retrieval.lengths=[64]", "data.path=/nowhere"], "/nowhere"),
        (
            ["retrieval.tasks=[mqar]", "retrieval.lengths=[64]", "--output", "/dev/null/here"],
            "/dev/null/here: cannot be",
        ),
    ],
)
def test_all_suites_are_checked_before_the_first_is_computed(
    tmp_path: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    line: str,
) -> None:
    """A suite after the domains is invalid: no domain may be evaluated and no weights loaded."""
    from megatron_ext.evaluation import runner

    def computed(*_: object) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(runner, "load_chunks", computed)
    run = _run_without_weights(tmp_path, data)
    before = sorted(run.rglob("*"))
    said = _refused(capsys, str(run), "--suite", "domains,retrieval", *arguments)
    assert said.startswith(line)
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--suite", "domain"], "--suite: no suite 'domain'; choose from: domains, retrieval, fewshot"),
        (["domains.resample=3"], "domains.resample: no such field; did you mean domains.resamples?"),
        (["domains.sequences=-1"], "domains.sequences: -1 is out of range; give a value of at least 0"),
        (["domains.confidence=2"], "domains.confidence: 2 is out of range; give a value less than 1"),
        (["domains.confidence=0"], "domains.confidence: 0 is out of range; give a value greater than 0"),
        (["domains.sequences"], "domains.sequences: is not an override; write it like domains.sequences=..."),
        (
            ["fewshot.limit=3"],
            "fewshot.limit: belongs to a suite that is not in --suite domains; add the suite to --suite",
        ),
        (["model.hidden_size=8"], "model.hidden_size: cannot be changed for a trained model; "),
        (["--processes", "0"], "--processes: 0 is less than 1; give 1 or more"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], line: str
) -> None:
    assert main(["evaluate", str(tmp_path), *arguments]) == 2
    (found,) = capsys.readouterr().err.splitlines()
    assert found.startswith(f"selectron: error: {line}")


def test_a_checkpoint_of_another_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step_7"
    assert main(["evaluate", str(folder), "--step", "8"]) == 2
    assert capsys.readouterr().err.endswith(
        f"--step: 8 is not the step of {folder}; omit --step, or give the run folder\n"
    )


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert call_command("evaluate", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("selectron: error: ")


def _run_without_weights(folder: Path, data: Path) -> Path:
    """Make a run folder with a checkpoint that contains no tensors."""
    run = folder / "run"
    run.mkdir()
    write_config(run, data, folder)
    checkpoints = CheckpointFolder(run / "checkpoints")
    checkpoints.create_partial(2)
    checkpoints.complete(2, {"progress": Progress(2), "identity": {}, "generators": []}, {}, Retention())
    return run


def test_a_step_without_a_checkpoint_is_answered_by_those_there_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_config(run, tmp_path / "data", tmp_path)
    checkpoints = CheckpointFolder(run / "checkpoints")
    missing = f"{run}/checkpoints/step_7: does not exist; "
    bring = "restore it from a backup, or train the run until it writes a checkpoint"
    assert _refused(capsys, f"{run}/checkpoints/step_7") == missing + bring
    for step in (2, 4):
        checkpoints.create_partial(step)
        parts = {"progress": Progress(step), "identity": {}, "generators": []}
        checkpoints.complete(step, parts, {}, Retention())
    for given in ([f"{run}/checkpoints/step_7"], [str(run), "--step", "7"]):
        assert _refused(capsys, *given) == f"{missing}give {run} with another --step (available: 2, 4)"
    (run / "checkpoints" / "step_4" / "checkpoint.json").unlink()
    assert _refused(capsys, f"{run}/checkpoints/step_4").endswith(f"; give {run} with another --step (available: 2)")
