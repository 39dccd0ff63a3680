"""Warnings at the top of a report for runs with different texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from analysis_synthetic import Synthetic, write_run

from megatron_ext.analysis.report import write_report
from megatron_ext.analysis.run_files import ModelSize, Texts
from megatron_ext.analysis.run_texts import epoch_warnings, epochs, text_warnings
from megatron_ext.analysis.runs import Run, read_run, read_runs
from megatron_ext.utils.errors import UserError


def entry(split: str, domain: str, documents: int = 5) -> dict[str, Any]:
    return {"split": split, "domain": domain, "documents": documents, "tokens": 1000, "sha256": str(documents)}


def texts(train: int = 5, test: int = 5) -> dict[str, Any]:
    entries = [entry("train", "web", train), entry("test", "code", test)]
    return {"train": f"train {train}", "evaluation": f"tests {test}", "texts": entries}


def a_run(name: str, data: dict[str, Any] | None, changed: list[dict[str, Any]] | None = None) -> Run:
    empty = np.zeros(0)
    size = ModelSize(9, 1, 1, None if data is None else Texts(**data), changed or [])
    return Run(Path(name), name, {}, 1, empty, empty, empty, empty, empty, (), size)


def test_runs_of_the_same_text_say_nothing() -> None:
    assert text_warnings([a_run("a", texts()), a_run("b", texts())]) == []
    assert text_warnings([a_run("a", None), a_run("b", None)]) == []


def test_the_run_that_differs_from_most_is_named() -> None:
    runs = [a_run("a", texts(train=6)), a_run("b", texts()), a_run("c", texts())]
    counts = "6 documents, 1,000 tokens against 5 documents, 1,000 tokens"
    line = f"a is trained on different text from b: web (train): {counts}"
    assert text_warnings(runs) == [line]
    (line,) = text_warnings([a_run("a", texts()), a_run("b", texts(test=7))])
    assert line.startswith("b is evaluated on different text from a: code (test): 7 documents")


def test_earlier_versions_and_changed_runs_are_said() -> None:
    changed = [{"step": 4, "field": "optimizer.lr", "before": 1e-3, "after": 1e-4}]
    earlier, lowered = text_warnings([a_run("a", texts(), changed), a_run("b", None)])
    assert earlier.startswith("b is of an earlier version that did not record the training text")
    assert lowered == "a was changed during training (optimizer.lr at step 4): no single configuration reproduces it"


@pytest.mark.usefixtures("unpainted")
def test_a_report_begins_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = {"parameters": 9, "embedding_parameters": 1, "output_layer_parameters": 1}
    runs = []
    for name, data, seed in (("a", texts(), 1), ("b", texts(train=6), 2)):
        run = Synthetic(name=name, seed=seed, size=size | {"data": data, "changed": []})
        runs.append(write_run(tmp_path / name, run))
    page = write_report(runs, tmp_path / "report").read_text()
    line = "b is trained on different text from a: web (train): 6 documents"
    assert line in page
    assert page.index(line) < page.index("Loss out of domain at the lowest training loss")
    assert f"warning: {line}" in capsys.readouterr().err
    assert "attention (text train 5)" in page  # and the runs are not averaged as seeds
    assert json.loads((tmp_path / "report" / "report.json").read_text())["files"]


def test_a_run_whose_text_to_evaluate_on_was_changed_is_named(tmp_path: Path) -> None:
    """The new documents have the same number and lengths as the old ones."""
    path = write_run(tmp_path / "a", Synthetic(name="a")) / "evaluation.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert read_run(tmp_path / "a").last_other_text_step == 0  # records of an earlier version have no digest
    steps = sorted({record["step"] for record in records})
    for record in records:
        record["data"] = "old" if record["step"] <= steps[2] else "new"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (line,) = text_warnings([read_run(tmp_path / "a")])
    assert line.startswith(f"a is evaluated on different text after step {steps[2]}: ")


def test_domains_that_are_spelled_otherwise_are_the_same(tmp_path: Path) -> None:
    size = {"parameters": 9, "embedding_parameters": 1, "output_layer_parameters": 1, "changed": []}
    runs = []
    for name, domain, data in (("a", "web", texts()), ("b", "WEB", texts()), ("c", "code", None)):
        config = {"data": {"train_domains": [domain]}}
        runs.append(write_run(tmp_path / name, Synthetic(name=name, config=config, size=size | {"data": data})))
    assert [run.name for run in read_runs(runs[:2])] == ["a", "b"]
    with pytest.raises(UserError, match="trained on code, the first run on web"):
        read_runs(runs)


def domains_changed(folder: Path, after: int, left: str, *, last: int | None = None) -> Path:
    """Write a run that was evaluated on one more domain until step `after`. `last` truncates its records."""
    path = write_run(folder, Synthetic(name=folder.name)) / "evaluation.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["data"] = "old" if record["step"] <= after else "new"
    remaining = [record for record in records if record["step"] <= after or record["domain"] != left][:last]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in remaining))
    return folder


@pytest.mark.usefixtures("unpainted")
def test_a_run_whose_test_domains_were_changed_is_compared_on_those_it_always_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = read_run(write_run(tmp_path / "complete", Synthetic(name="whole")))
    code = next(domain.domain for domain in complete.domains if domain.split == "test")
    run = read_run(domains_changed(tmp_path / "a", 100, code))
    problem = (
        f"{code} (test) not used, because only some evaluations have it: data.test_domains was changed during the run"
    )
    assert capsys.readouterr().err == f"warning: {tmp_path}/a/evaluation.jsonl: {problem}\n"
    assert run.evaluation_steps.tolist() == complete.evaluation_steps.tolist()
    remaining = [domain for domain in complete.domains if domain.domain != code]
    assert [(one.split, one.domain) for one in run.domains] == [(one.split, one.domain) for one in remaining]
    assert all(np.array_equal(one.losses, other.losses) for one, other in zip(run.domains, remaining, strict=True))
    (line,) = text_warnings([run])
    assert line.startswith(f"a is evaluated on {code} (test) at only some of its steps, because its test domains were")
    assert line in write_report([tmp_path / "a"], tmp_path / "report").read_text()
    both = read_runs([tmp_path / "complete", tmp_path / "a"])
    assert [[one.domain for one in found.domains] for found in both] == [[one.domain for one in remaining]] * 2


def test_an_interrupted_last_evaluation_on_other_text_is_no_change_of_domains(tmp_path: Path) -> None:
    complete = write_run(tmp_path / "complete", Synthetic(name="whole")) / "evaluation.jsonl"
    lines = [json.loads(line) for line in complete.read_text().splitlines()]
    steps = sorted({line["step"] for line in lines})
    run = read_run(domains_changed(tmp_path / "a", steps[-2], "", last=len(lines) - 1))
    assert run.evaluation_steps.tolist() == [step for step in steps[:-1] if step > 0]
    assert run.partial_domains == ()


def test_epochs_are_the_most_that_a_domain_was_read(tmp_path: Path) -> None:
    """200 steps of 4096 tokens over domains of 100,000 and 500,000 tokens, without and with weights."""
    domains = [("web", "train", 100_000), ("books", "train", 500_000), ("web", "validation", 1000)]
    data = {"train": "t", "evaluation": "e"}
    data["texts"] = [
        {"split": split, "domain": name, "documents": 9, "tokens": count} for name, split, count in domains
    ]
    size = {"parameters": 9, "embedding_parameters": 1, "output_layer_parameters": 1, "data": data}
    plain = read_run(write_run(tmp_path / "plain", Synthetic(name="plain", size=size)))
    weights = {"data": {"weights": {"web": 1.0, "books": 1.0}}}
    weighted = read_run(write_run(tmp_path / "weighted", Synthetic(name="weighted", size=size, config=weights)))
    assert epochs(plain) == pytest.approx(200 * 4096 / 600_000)
    assert epochs(weighted) == pytest.approx(200 * 4096 / 2 / 100_000)
    assert epochs(read_run(write_run(tmp_path / "old", Synthetic()))) is None
    (line,) = epoch_warnings([plain, weighted])
    assert line.startswith("plain, weighted are trained on some text more than once (up to 4.1 times): ")
    short = replace(plain, tokens=plain.tokens // 2)
    assert epoch_warnings([short]) == []
