"""Evaluation suites between steps: they leave the training curve unchanged and write their results."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import whole_run
from corpora import prepared
from launching import call, call_command, curve, records, write_config
from questions import write_questions
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_ext.evaluation.generators import preserve_random_states

RETRIEVAL = ["training.evaluate_suites=[retrieval]", "training.evaluate_suites_every=2"]
BOTH = ["training.evaluate_suites=[retrieval, fewshot]", RETRIEVAL[1]]
OPTIONS = ["retrieval.tasks=[mqar, passkey]", "retrieval.lengths=[64, 512]", "retrieval.samples=1"]
RUN = [
    *("training.steps=3", "training.evaluate_every=0", "training.checkpoint_every=0"),
    *("model.pattern=top1_chunk,gated_deltanet", "model.max_position_embeddings=512"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("between"), documents=60)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of the suite `fewshot` with two rows for each of three tasks."""
    folder = tmp_path_factory.mktemp("questions")
    write_questions(folder / "published", folder / "columns")
    return [f"fewshot.data={folder / 'published'}", "fewshot.tasks=[piqa, arc_easy, boolq]", "fewshot.limit=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [[], ["parallel.pipeline=2", "retrieval.tasks=[mqar, induction]"]], ids=["one_process", "pp2"]
)
def test_a_run_goes_on_as_if_nothing_had_been_tested(
    pool: Any,
    data: Path,
    questions: list[str],
    tmp_path: Path,
    layout: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    curves, processes = {}, 2 if layout else 1
    options = [*OPTIONS, "retrieval.unfit=skip", *layout[1:], *questions]
    for name, more in {"plain": [], "tested": [*BOTH, *options]}.items():
        config = write_config(tmp_path, data, tmp_path / name)
        pool.run(whole_run.run, processes, config, [*RUN, *layout[:1], *more])
        curves[name] = curve(tmp_path / name / "run")
    assert curves["tested"] == curves["plain"]  # losses, norms and learning rates are bit-identical
    run = tmp_path / "tested" / "run"
    _check_results(run)
    _evaluate(run, tmp_path / "again", options)
    for suite in ("retrieval", "fewshot"):
        assert _numbers(tmp_path / "again", suite) == _numbers(run / "evaluation" / "step_3", suite)
    assert (tmp_path / "again" / "retrieval.md").read_text() in capsys.readouterr().out


def _check_results(run: Path) -> None:
    """Check that results have the format of `selectron evaluate` and that the run's records hold the same numbers."""
    kept = records(run, "suites.jsonl")
    assert [(one["step"], one["suite"]) for one in kept] == [
        (step, suite) for step in (2, 3) for suite in ("retrieval", "fewshot")
    ]
    board = EventAccumulator(str(run / "tensorboard")).Reload()
    for one in kept:
        suite = one["suite"]
        results = json.loads((run / "evaluation" / f"step_{one['step']}" / f"{suite}.json").read_text())
        assert (results["run"], results["step"], results["tokens"]) == ("run", one["step"], one["tokens"])
        scores = _scores(results)
        assert one["scores"] == scores
        assert scores
        for name, score in scores.items():
            shown = {event.step: event.value for event in board.Scalars(f"{suite}/{name}")}
            assert shown[one["step"]] == pytest.approx(score)


def _scores(results: dict[str, Any]) -> dict[str, float]:
    """Return scores by the names that records use."""
    if "by_length" in results:
        return {f"{mean['task']}/{mean['length']}": mean["score"] for mean in results["by_length"]}
    assert {name: task["rows"] for name, task in results["tasks"].items()} == {"piqa": 2, "arc_easy": 2, "boolq": 2}
    return {
        f"{name}/{metric['name']}": metric["value"]
        for name, task in results["tasks"].items()
        for metric in task["metrics"]
    }


def _evaluate(run: Path, output: Path, options: list[str]) -> None:
    """Evaluate the finished run in this process."""
    arguments = ["evaluate", str(run), "--suite", "retrieval,fewshot", *options, "--output", str(output)]
    assert call_command(*arguments) == 0


def _numbers(folder: Path, suite: str) -> dict[str, Any]:
    """Return the results of a suite, including each sample's answer, without durations."""
    return {key: value for key, value in json.loads((folder / f"{suite}.json").read_text()).items() if key != "seconds"}


def test_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with preserve_random_states():
        torch.manual_seed(torch.initial_seed() + 1)
        assert draw() != expected
    assert draw() == expected


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (RETRIEVAL[:1], "training.evaluate_suites_every: 0, with training.evaluate_suites retrieval; give the steps"),
        (RETRIEVAL[1:], "training.evaluate_suites_every: 2, but training.evaluate_suites is not set; set it"),
        (
            ["training.evaluate_suites=[recall]", RETRIEVAL[1]],
            "training.evaluate_suites: no suite 'recall'; choose from: retrieval, fewshot",
        ),
        (
            ["training.evaluate_suites=[domains]", RETRIEVAL[1]],
            "training.evaluate_suites: no suite 'domains'; choose from: retrieval, fewshot",
        ),
        (
            [*RETRIEVAL, "retrieval.lengths=[512, 1024]"],
            "retrieval.lengths: 1024, but the model supports at most 512 tokens; reduce them",
        ),
        (
            [*RETRIEVAL, "retrieval=64"],
            "retrieval: is a section, not a field; set one of its fields: retrieval.FIELD=...",
        ),
        ([*RETRIEVAL, "retrieval.length=[64]"], "retrieval.length: no such field; did you mean lengths?"),
        ([*RETRIEVAL, "retrieval.samples=0"], "retrieval.samples: 0 is out of range; give a value greater than 0"),
        (
            [*RETRIEVAL, *OPTIONS, "fewshot.limit=3"],
            "fewshot.limit: belongs to a suite that is not in training.evaluate_suites; add fewshot there",
        ),
        (
            ["training.evaluate_suites=[fewshot]", RETRIEVAL[1], "fewshot.data=/nowhere"],
            "fewshot.data: /nowhere is not a directory; choose a directory",
        ),
        ([*RETRIEVAL, *OPTIONS], "retrieval.lengths: 64 does not fit passkey: the shortest sample takes "),
        (
            [*RETRIEVAL, "retrieval.lengths=[512]", "retrieval.haystack=/nowhere"],
            "retrieval.haystack: /nowhere does not exist; give a file",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_the_first_step(
    capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path, arguments: list[str], line: str
) -> None:
    assert call(write_config(tmp_path, data, tmp_path), *RUN, *arguments) == 2
    assert f"selectron: error: {line}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
