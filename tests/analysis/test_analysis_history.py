"""Histories of runs, read from their folders."""

import json

import pytest
from analysis_synthetic import TOKENS_A_STEP, Synthetic, write_run

from megatron_ext.analysis.cells import NOTHING
from megatron_ext.analysis.history import differences, duration, history_row, read_skipped
from megatron_ext.analysis.report import write_report
from megatron_ext.analysis.runs import read_run
from megatron_ext.utils.errors import UserError


def test_what_a_run_recorded(tmp_path):
    run = read_run(write_run(tmp_path / "run", Synthetic(steps=40, config={"training": {"steps": 50}})))
    found = history_row(run)
    assert (found["steps"].text, found["steps"].value) == ("40 of 50", 40)
    assert found["tokens"].value == 40 * TOKENS_A_STEP
    rates = [5000.0 + step % 3 for step in range(1, 41)]
    assert found["time in steps"].value == pytest.approx(sum(TOKENS_A_STEP / rate for rate in rates))
    assert found["tokens/s (median)"].value == sorted(rates)[20]
    assert found["peak memory per process"].text == "1.00 GiB"
    assert found["of peak FLOP/s (median)"] == found["parameters"] == found["starts"] == NOTHING


@pytest.mark.usefixtures("unpainted")
def test_jobs_and_their_starts(tmp_path):
    folder = write_run(tmp_path / "run", Synthetic(steps=40))
    events = {
        "2": "2026-01-01T00:00:00Z\t7\t0\tbegun on n1\n2026-01-01T01:00:00Z\t7\t0\tasked to stop by USR1\n"
        "2026-01-01T01:01:00Z\t7\t1\tbegun on n2\n2026-01-01T02:00:00Z\t7\t1\tfinished\nhalf a li",
        "1": "2025-12-31T00:00:00Z\t6\t0\tbegun on n1\n2025-12-31T01:00:00Z\t6\t0\tstopped\n",
    }
    for number, text in events.items():
        (folder / "launch" / number).mkdir(parents=True)
        (folder / "launch" / number / "events.tsv").write_text(text)
    found = history_row(read_run(folder))
    assert (found["jobs"].value, found["starts"].value) == (2, 3)
    assert found["last event"].text == "finished (2026-01-01T02:00:00Z)"
    page = write_report([folder], tmp_path / "report").read_text()
    assert "finished (2026-01-01T02:00:00Z)" in page
    (folder / "launch" / "1" / "events.tsv").write_text("what is this\n")
    page = write_report([folder], tmp_path / "report").read_text()  # the damage must not stop the report
    assert "finished (2026-01-01T02:00:00Z); 1 damaged lines in events.tsv" in page


def skip(folder, *problems, step=0):
    shards = [{"shard": f"{n}.tar", "tokens": 10, "problem": problem} for n, problem in enumerate(problems)]
    record = {"step": step, "tokens": 10 * len(shards), "samples_an_epoch": 1234, "of_samples": 2000, "shards": shards}
    with (folder / "skipped_shards.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


@pytest.mark.usefixtures("unpainted")
def test_skipped_shards_are_named_until_they_are_whole_again(tmp_path):
    folder = write_run(tmp_path / "run", Synthetic(steps=40))
    assert read_skipped(read_run(folder)) == []
    assert "Skipped shards" not in write_report([folder], tmp_path / "report").read_text()
    skip(folder, "train/0.tar: is cut off")
    skip(folder, "train/0.tar: is cut off", "<train/1.tar>: sha256 differs", step=20)
    page = " ".join(write_report([folder], tmp_path / "report").read_text().split())
    assert "train/0.tar: is cut off; &lt;train/1.tar&gt;: sha256 differs" in page
    assert "1 234 of 2 000" in page
    skip(folder, step=30)  # one shard was repaired
    found = read_skipped(read_run(folder))
    assert [(one.record.step, one.until, len(one.record.shards)) for one in found] == [(0, 20, 1), (20, 30, 2)]
    assert "Skipped shards" in write_report([folder], tmp_path / "report").read_text()
    (folder / "skipped_shards.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"skipped_shards\.jsonl: was not written by training; "):
        write_report([folder], tmp_path / "report")


def test_only_fields_that_differ_are_named(tmp_path):
    shared = {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]}}
    chunk = {"pattern": "top1_chunk*4", "mixers": {"top1_chunk": {"top_k": 1}}}
    runs = [
        Synthetic(name="a", config=shared, mixers={"attention": {"window": None}}),
        Synthetic(name="b", config={"optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]}}, **chunk),
        Synthetic(name="c", config=shared | {"model": {"tie": True}}, **chunk),
    ]
    read = [read_run(write_run(tmp_path / run.name, run)) for run in runs]
    fields, values = differences(read)
    assert set(fields) == {"model.pattern", "optimizer.betas", "model.tie"}  # no fields that only one mixer has
    rows = [{field: cell.text for field, cell in zip(fields, cells, strict=True)} for cells in values]
    assert [one["optimizer.betas"] for one in rows] == ["0.9, 0.95", "0.9, 0.99", "0.9, 0.95"]
    assert [one["model.tie"] for one in rows] == [NOTHING.text, NOTHING.text, "true"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(9.04, "9.0 s"), (59.7, "1 min 0 s"), (3599, "59 min 59 s"), (3660, "1 h 1 min"), (200_000, "2 d 7 h")],
)
def test_durations(seconds, words):
    assert duration(seconds).text == words
    assert duration(float("nan")) == NOTHING
