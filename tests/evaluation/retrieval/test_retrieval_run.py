"""Complete suites over models that find everything or nothing, and the files they write."""

from __future__ import annotations

import csv
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from retrieval_fakes import Characters, FakeModel, Words, guess, read

from megatron_ext.evaluation.retrieval.options import RetrievalOptions
from megatron_ext.evaluation.retrieval.registry import load_all
from megatron_ext.evaluation.retrieval.report import markdown, write_results
from megatron_ext.evaluation.retrieval.results import RetrievalResults
from megatron_ext.evaluation.retrieval.run import evaluate_retrieval
from megatron_ext.utils.errors import UserError

TASKS = load_all()


def _options(**changes: Any) -> RetrievalOptions:
    return RetrievalOptions(**({"lengths": [1024, 4096], "depths": [0.0, 0.6, 1.0], "samples": 3} | changes))


@pytest.fixture(scope="module")
def found() -> RetrievalResults:
    return evaluate_retrieval(FakeModel(Words(), read), _options())


def test_a_model_that_reads_finds_everything(found: RetrievalResults) -> None:
    assert [(one.task, one.length, one.score) for one in found.by_length()] == [
        (task, length, 1.0) for task in TASKS for length in (1024, 4096)
    ]
    assert found.skipped == []


def test_every_sample_is_recorded(found: RetrievalResults) -> None:
    with_depth = sum(task.has_depth for task in TASKS.values())
    assert len(found.records) == 2 * 3 * (3 * with_depth + len(TASKS) - with_depth)
    assert len({(one.task, one.length, one.depth, one.index) for one in found.records}) == len(found.records)
    assert all(one.tokens <= one.length for one in found.records)
    assert {one.generated is None for one in found.records if one.task in ("mqar", "induction")} == {True}
    passkeys = [one.generated for one in found.records if one.task == "passkey"]
    assert all(text is not None and text.endswith(".") and "so on" not in text for text in passkeys)  # it was stopped


def test_a_model_that_guesses_finds_nothing() -> None:
    model = FakeModel(Words(), guess(random.Random(5)))
    model.foretell = lambda context: [context[0]]  # type: ignore[method-assign]
    results = evaluate_retrieval(model, _options(lengths=[1024], samples=5))
    scores = {one.task: one.score for one in results.by_length()}
    assert set(scores) == set(TASKS)
    assert all(score < 0.15 for score in scores.values())


def test_a_model_of_characters_is_tested_at_its_own_lengths() -> None:
    results = evaluate_retrieval(FakeModel(Characters(), read), _options(unfit="skip", samples=1))
    # The limit of an answer counts tokens: 30 characters hold five names of five letters and the blanks.
    scores = {(one.task, one.length): one.score for one in results.by_length()}
    assert {(one.task, one.length) for one in results.skipped} == {("vt", 1024), ("cwe", 1024), ("cwe", 4096)}
    exact = {"passkey", "niah_single_1", "niah_multikey_3", "niah_multiquery", "vt", "fwe", "mqar", "selective_copying"}
    assert {score for (task, _), score in scores.items() if task in exact} == {1.0}


def test_one_cell_is_the_same_whatever_else_is_tested(found: RetrievalResults) -> None:
    alone = _options(tasks=["niah_multikey_1"], lengths=[4096], depths=[0.6], samples=2)
    records = evaluate_retrieval(FakeModel(Words(), read), alone).records
    assert list(records) == [
        one
        for one in found.records
        if (one.task, one.length, one.depth) == ("niah_multikey_1", 4096, 0.6) and one.index < 2
    ]


def test_a_length_beyond_the_model_is_refused_before_it_is_called() -> None:
    model = FakeModel(Words(), read, max_length=2048)
    with pytest.raises(
        UserError, match=r"retrieval.lengths: 4096 does not fit passkey: the model supports at most 2048"
    ) as e:
        evaluate_retrieval(model, _options(tasks=["passkey"]))
    assert "\n" not in str(e.value)
    assert model.asked == 0


def test_a_length_that_is_skipped_is_reported(tmp_path: Path) -> None:
    model = FakeModel(Words(), read, max_length=2048)
    results = evaluate_retrieval(model, _options(tasks=["passkey", "vt"], unfit="skip"))
    assert {(one.task, one.length) for one in results.skipped} == {("passkey", 4096), ("vt", 4096)}
    assert {one.length for one in results.records} == {1024}
    assert "* vt at 4096 tokens: the model supports at most 2048 tokens\n" in markdown(results)


@pytest.mark.parametrize(
    "changes",
    [{"tasks": ["nihah"]}, {"tasks": []}, {"depths": [1.5]}, {"lengths": [0]}, {"lengths": [64, 64]}, {"samples": 0}],
)
def test_options_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        _options(**changes)


def test_files_hold_the_results(found: RetrievalResults, tmp_path: Path) -> None:
    write_results(found, {"run": "a", "step": 7}, tmp_path)
    told = json.loads((tmp_path / "retrieval.json").read_text())
    assert (told["run"], told["step"]) == ("a", 7)
    assert told["schema"] == "selectron.retrieval.1"
    assert len(told["records"]) == len(found.records)
    assert told["options"]["lengths"] == [1024, 4096]
    rows = list(csv.DictReader((tmp_path / "retrieval.csv").open()))
    assert len(rows) == len(found.by_depth()) == len(told["by_depth"])
    first_passkey = next(row for row in rows if row["task"] == "passkey")
    assert first_passkey | {"low": ""} == {
        "task": "passkey",
        "length": "1024",
        "depth": "0.0",
        "samples": "3",
        "score": "1.0",
        "low": "",
        "high": "1.0",
    }
    assert "| vt | 100.0 (43.9 to 100.0) | 100.0 (43.9 to 100.0) |" in (tmp_path / "retrieval.md").read_text()


def test_the_picture_is_whole_and_the_same_each_time(found: RetrievalResults, tmp_path: Path) -> None:
    pictures = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_results(found, {}, tmp_path / name)
        pictures.append((tmp_path / name / "retrieval.png").read_bytes())
    assert pictures[0] == pictures[1]
    width, height = struct.unpack(">II", pictures[0][16:24])
    assert pictures[0].endswith(b"IEND\xaeB`\x82")
    assert 1000 < width < 4000 > height > 800


def test_where_nothing_was_tested_no_earlier_picture_stays(found: RetrievalResults, tmp_path: Path) -> None:
    write_results(found, {}, tmp_path)
    nothing = evaluate_retrieval(FakeModel(Words(), read, max_length=64), _options(unfit="skip"))
    write_results(nothing, {}, tmp_path)
    assert not (tmp_path / "retrieval.png").exists()
    assert json.loads((tmp_path / "retrieval.json").read_text())["records"] == []
