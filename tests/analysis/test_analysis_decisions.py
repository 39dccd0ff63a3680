"""Decisions of runs about faulty steps, as shown in the report."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from analysis_synthetic import TOKENS_A_STEP, Synthetic, replace_drawing, write_run
from browser import Browser, missing

from megatron_ext.analysis.cells import NOTHING
from megatron_ext.analysis.decisions import (
    RunDecisions,
    data_differences,
    decision_counts,
    decision_table,
    read_decisions,
    slow_table,
)
from megatron_ext.analysis.page import _skipped_table
from megatron_ext.analysis.report import write_report
from megatron_ext.analysis.runs import read_run
from megatron_ext.analysis.style import LIGHT
from megatron_ext.utils.errors import UserError

CHUNK = {"pattern": "top1_chunk*4"}


def note(folder: Path, *decisions: tuple[int, str], **more: Any) -> None:
    """Record decisions as training does. Skipped steps have no metrics."""
    with (folder / "decisions.jsonl").open("a") as file:
        for step, decision in decisions:
            line = f"<the gradient's norm> is not finite: {decision}"
            record = {"time": f"2026-01-01T00:00:{step:02}+00:00", "step": step, "decision": decision, "line": line}
            file.write(json.dumps(record | {"loss": 3.5, "grad_norm": None} | more) + "\n")
    left_out = {step for step, decision in decisions if decision == "skip"}
    metrics = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    remaining = [line for line in metrics if json.loads(line)["step"] not in left_out]
    (folder / "metrics.jsonl").write_text("".join(remaining))


def a_run(tmp_path: Path, name: str = "plain", **fields: Any) -> Path:
    return write_run(tmp_path / name, Synthetic(name=name, steps=60, **fields))


def decisions_of(*folders: Path) -> list[RunDecisions]:
    return read_decisions(read_run(folder) for folder in folders)


def words(page: Path) -> str:
    return " ".join(page.read_text(encoding="utf-8").split())


def test_steps_are_counted_once(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    assert set(decision_counts(decisions_of(folder)[0]).values()) == {NOTHING}
    note(folder, (4, "again"), (4, "again"), (7, "again"), (7, "skip"))
    note(folder, (50, "roll_back"), to_step=40, samples=800)
    found = {column: cell.value for column, cell in decision_counts(decisions_of(folder)[0]).items()}
    assert found == {
        "steps computed again": 2,
        "steps skipped": 1,
        "roll-backs": 1,
        "stops": None,
        "changes during the run": None,
    }


def test_a_row_a_decision(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    note(folder, (4, "again"), (4, "skip"))
    (first, second) = decision_table(decisions_of(folder)).rows
    assert [cell.text for cell in first] == [
        "plain",
        "2026-01-01T00:00:04+00:00",
        "4",
        "computed again",
        "<the gradient's norm> is not finite: again",
    ]
    assert second[3].text == "skipped"


@pytest.mark.usefixtures("unpainted")
def test_a_slow_rank_has_one_row(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    slow = "rank 1 on n1 is slow: it took {} ms for a matrix product, the middle rank 10"
    lines = [(10, [slow.format(16)]), (20, []), (30, [slow.format(18), "rank 3 on n2 is slow: it took 9 ms"])]
    records = [{"step": step, "slow": named, "ranks": [{"rank": 0}]} for step, named in lines]
    (folder / "stragglers.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    one, three = slow_table(decisions_of(folder)).rows
    last = "it took 18 ms for a matrix product, the middle rank 10"
    assert [cell.text for cell in one] == ["plain", "rank 1 on n1", "2 of 3", "10", "30", last]
    assert [cell.text for cell in three][1:5] == ["rank 3 on n2", "1 of 3", "30", "30"]
    page = words(write_report([folder], tmp_path / "report"))
    assert last in page
    assert "<details>" not in page


def test_who_left_out_what(tmp_path: Path) -> None:
    plain, chunk = a_run(tmp_path), a_run(tmp_path, "chunk", **CHUNK)
    assert data_differences(decisions_of(plain, chunk)) == []
    note(chunk, (4, "again"))
    assert data_differences(decisions_of(plain, chunk)) == []  # repeated steps use the same samples
    note(chunk, (4, "skip"), (5, "skip"))
    assert data_differences(decisions_of(plain, chunk)) == ["chunk skipped the samples of 2 steps (4, 5)"]
    note(plain, (4, "skip"), (5, "skip"))
    assert data_differences(decisions_of(plain, chunk)) == []
    note(plain, (45, "roll_back"), to_step=40)
    note(plain, (41, "roll_back"), to_step=40)
    both = "skipped the samples of 2 steps (4, 5)"
    rolled = ", and skipped the samples of steps that it rolled back (41 to 45, 41)"
    assert data_differences(decisions_of(plain, chunk)) == [f"plain {both}{rolled}", f"chunk {both}"]


def test_a_skipped_step_that_was_made_later_left_nothing_out(tmp_path: Path) -> None:
    """The run was killed after the skipped step, resumed from an earlier checkpoint, and then completed that step."""
    plain, chunk = a_run(tmp_path), a_run(tmp_path, "chunk", **CHUNK)
    metrics = (chunk / "metrics.jsonl").read_bytes()
    note(chunk, (4, "skip"))
    (chunk / "metrics.jsonl").write_bytes(metrics)
    assert data_differences(decisions_of(plain, chunk)) == []


@pytest.mark.usefixtures("unpainted")
def test_shards_that_one_run_did_without(tmp_path: Path) -> None:
    plain, chunk = a_run(tmp_path), a_run(tmp_path, "chunk", **CHUNK)
    shards = [{"shard": f"{n}.tar", "tokens": 10, "problem": f"{n}.tar: is cut off"} for n in range(2)]
    record = {"step": 0, "tokens": 20, "samples_an_epoch": 9, "of_samples": 10, "shards": shards}
    (plain / "skipped_shards.jsonl").write_text(json.dumps(record) + "\n")
    assert data_differences(decisions_of(plain, chunk)) == ["plain skipped 2 shards"]
    assert "plain skipped 2 shards." in words(write_report([plain, chunk], tmp_path / "report"))
    repaired = {**record, "step": 20, "tokens": 0, "samples_an_epoch": 10, "shards": []}
    (plain / "skipped_shards.jsonl").write_text(f"{json.dumps(record)}\n{json.dumps(repaired)}\n")
    assert data_differences(decisions_of(plain, chunk)) == ["plain skipped 2 shards until step 20"]
    (chunk / "skipped_shards.jsonl").write_text(json.dumps(record | {"step": 4}) + "\n")
    expected = ["plain skipped 2 shards until step 20", "chunk skipped 2 shards after step 4"]
    assert data_differences(decisions_of(plain, chunk)) == expected
    table = _skipped_table([one.run for one in decisions_of(plain, chunk)])
    assert [[cell.text for cell in row[:4]] for row in table.rows] == [
        ["plain", "0", "20", "2"],
        ["chunk", "4", NOTHING.text, "2"],
    ]


@pytest.mark.usefixtures("painted_once")
def test_the_report_says_it_at_the_top_and_below(tmp_path: Path) -> None:
    plain, chunk = a_run(tmp_path), a_run(tmp_path, "<i>chunk</i>", **CHUNK)
    note(chunk, (30, "again"), (30, "skip"))
    page = write_report([plain, chunk], tmp_path / "report")
    text = words(page)
    answer = text[text.index('<div class="answer">') : text.index("<nav")]
    assert "The runs were not all trained on the same data:" in answer
    assert "&lt;i&gt;chunk&lt;/i&gt; skipped the samples of 1 step (30)." in answer
    history = text[text.index('<h2 id="history">') : text.index('<h2 id="definitions">')]
    assert "&lt;the gradient&#39;s norm&gt; is not finite: skip" in history
    assert "steps skipped" in history
    assert "roll-backs" not in history
    assert "an upright tick at each faulty step: 1 of &lt;i&gt;chunk" in text
    rows = list(csv.DictReader((page.parent / "training_loss_decisions.csv").open()))
    assert [(row["run"], row["step"], row["done"]) for row in rows] == [
        ("<i>chunk</i>", "30", "computed again"),
        ("<i>chunk</i>", "30", "skipped"),
    ]
    assert {int(row["tokens"]) for row in rows} == {29 * TOKENS_A_STEP}
    before = (page.parent / "training_loss.png").read_bytes()
    (chunk / "decisions.jsonl").unlink()
    assert "upright tick" not in words(write_report([plain, chunk], tmp_path / "report"))
    assert not (page.parent / "training_loss_decisions.csv").exists()
    assert (page.parent / "training_loss.png").read_bytes() != before, "a tick is drawn"


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    note(folder, (4, "again"))
    with (folder / "decisions.jsonl").open("a") as file:
        file.write('{"time": "2026", "step": 9, "decision": "guess", "line": ""}\n')
    with pytest.raises(UserError, match=r"decisions\.jsonl:2: decision: .*; restore the file or repeat the run"):
        write_report([folder], tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_what_a_killed_run_was_writing_is_left_out(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    note(folder, (4, "again"))
    with (folder / "decisions.jsonl").open("a") as file:
        file.write('{"time": "20')
    assert [one.step for one in decisions_of(folder)[0].decisions] == [4]


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_many_decisions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report of a run that skipped 13 steps."""
    folder = tmp_path_factory.mktemp("many")
    plain, chunk = a_run(folder), a_run(folder, "chunk", **CHUNK)
    note(chunk, *((step, "skip") for step in range(21, 34)))
    with pytest.MonkeyPatch.context() as patch:
        replace_drawing(patch, lambda draw: lambda *_: draw(LIGHT, False))
        return write_report([plain, chunk], folder / "report")


@pytest.mark.skipif(bool(missing()), reason=missing() or "never")
@pytest.mark.parametrize("width", [1280, 390])
def test_many_decisions_are_folded(of_many_decisions: Path, window: Browser, width: int) -> None:
    window.show(width)
    window.open(of_many_decisions)
    assert window.complaints() == []
    assert window.run("return document.querySelector('summary').innerText") == "13 decisions about faulty steps"
    shown = "return document.querySelector('details table').checkVisibility({contentVisibilityAuto: true})"
    height = "return document.querySelector('details').getBoundingClientRect().height"
    folded = window.run(height)
    window.press("summary")
    assert window.run("return document.querySelector('details').open")
    assert window.run(shown)
    assert window.run(height) > folded + 13 * 20
    widths = window.run("const d = document.documentElement; return [d.scrollWidth, d.clientWidth]")
    assert widths[0] <= widths[1] <= width
