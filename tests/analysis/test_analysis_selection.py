"""Selection of runs: those that cannot be compared are excluded by name, the others are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from analysis_synthetic import Synthetic, write_run

from megatron_ext.analysis.architecture import group_runs
from megatron_ext.analysis.selection import NOT_EVALUATED, select_runs, with_unevaluated
from megatron_ext.cli import main
from megatron_ext.utils.errors import UserError

DELTA = {"name": "delta", "pattern": "gated_deltanet*4"}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Folder with two comparable runs and four others."""
    folder = tmp_path / "runs"
    write_run(folder / "attention", Synthetic())
    write_run(folder / "delta", Synthetic(**DELTA, gap=0.1))
    write_run(folder / "bare", Synthetic(name="bare", seed=2)).joinpath("evaluation.jsonl").unlink()
    write_run(folder / "damaged", Synthetic(name="damaged")).joinpath("metrics.jsonl").write_bytes(b"\0" * 30 + b"\n")
    write_run(folder / "converted", Synthetic(name="converted")).joinpath("metrics.jsonl").unlink()
    write_run(folder / "other", Synthetic(name="other", seed=3, corpus_seed=8))
    return folder


def test_the_others_are_compared(sweep: Path) -> None:
    found = select_runs([sweep])
    assert [run.path.name for run in found.compared] == ["attention", "delta"]
    assert [run.path.name for run in found.unevaluated] == ["bare"]
    reasons = {Path(line.split(": ")[0]).name: line.split(": ", 1)[1] for line in found.excluded}
    assert reasons["bare"] == NOT_EVALUATED
    assert reasons["damaged"] == f"is not a JSON object ({sweep / 'damaged' / 'metrics.jsonl'}:1)"
    assert reasons["converted"].startswith("is missing (")
    assert reasons["other"].startswith("domain ")
    assert len(reasons) == 4


def test_a_run_that_is_named_must_be_right(sweep: Path) -> None:
    for name in ("damaged", "converted", "bare"):
        with pytest.raises(UserError):
            select_runs([sweep, sweep / name])
        with pytest.raises(UserError):
            select_runs([sweep / "attention", sweep / name])


def test_a_run_without_evaluations_is_drawn_among_its_like(sweep: Path) -> None:
    found = select_runs([sweep])
    architectures = with_unevaluated(group_runs(found.compared), found.unevaluated)
    assert [[run.name for run in one.runs] for one in architectures] == [["attention", "bare"], ["delta"]]


@pytest.mark.usefixtures("unpainted")
def test_the_report_says_so(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(sweep), "--output", str(tmp_path / "report")]) == 0
    printed = capsys.readouterr()
    assert f"warning: {sweep / 'bare'}: {NOT_EVALUATED}\n" in printed.err
    lines = printed.out.splitlines()
    assert lines[0] == f"report: {tmp_path / 'report' / 'index.html'}"
    assert lines[1] == (
        "compared: 2 runs of 2 architectures, at the lowest training loss that an architecture and its baseline both "
        "reached"
    )
    assert lines[3].startswith("  gated_deltanet against attention at 2.8707: ")
    assert "higher loss (+0.1000, 95 % interval +0.1" in lines[3]
    assert lines[4].startswith("Every architecture has one seed")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert page.index("Not compared:") < page.index("<nav")
    assert f"{sweep / 'damaged'}: is not a JSON object" in page
    assert "\nbare,attention,2," in (tmp_path / "report" / "training_loss.csv").read_text()
