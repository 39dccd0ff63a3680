"""Suites between two steps: they leave the run's curve as it was, and their results where they are looked for."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import prepared
from launching import call, curve, must_run, records, write_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_ext.evaluation.generators import generators_kept

RETRIEVAL = ["training.evaluate_suites=[retrieval]", "training.evaluate_suites_every=2"]
OPTIONS = ["retrieval.tasks=[mqar, passkey]", "retrieval.lengths=[64, 512]", "retrieval.samples=1"]
RUN = [
    *("training.steps=3", "training.evaluate_every=0", "training.checkpoint_every=0"),
    *("model.pattern=top1_chunk,gated_deltanet", "model.max_position_embeddings=512"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("between"), documents=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [[], ["parallel.pipeline=2", "retrieval.tasks=[mqar, induction]"]], ids=["one_process", "pp2"]
)
def test_a_run_goes_on_as_if_nothing_had_been_tested(data: Path, tmp_path: Path, layout: list[str]) -> None:
    curves = {}
    tested = [*RETRIEVAL, *OPTIONS, "retrieval.unfit=skip", *layout[1:]]
    for name, more in {"plain": [], "tested": tested}.items():
        config = write_config(tmp_path, data, tmp_path / name)
        must_run(config, [*RUN, *layout[:1], *more], processes=2 if layout else 1)
        curves[name] = curve(tmp_path / name / "run")
    assert curves["tested"] == curves["plain"]  # losses, norms and rates, to the last bit
    _check_results(tmp_path / "tested" / "run")


def _check_results(run: Path) -> None:
    """As `selectron evaluate` writes them, and the same numbers in the run's own records."""
    kept = records(run, "suites.jsonl")
    assert [(one["step"], one["suite"]) for one in kept] == [(2, "retrieval"), (3, "retrieval")]
    board = EventAccumulator(str(run / "tensorboard")).Reload()
    for one in kept:
        results = json.loads((run / "evaluation" / f"step_{one['step']}" / "retrieval.json").read_text())
        assert (results["run"], results["step"], results["tokens"]) == ("run", one["step"], one["tokens"])
        scores = {f"{mean['task']}/{mean['length']}": mean["score"] for mean in results["by_length"]}
        assert one["scores"] == scores
        assert scores
        for name, score in scores.items():
            shown = {event.step: event.value for event in board.Scalars(f"retrieval/{name}")}
            assert shown[one["step"]] == pytest.approx(score)


def test_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with generators_kept():
        torch.manual_seed(torch.initial_seed() + 1)
        assert draw() != expected
    assert draw() == expected


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (RETRIEVAL[:1], "training.evaluate_suites_every: 0, with training.evaluate_suites retrieval; give the steps"),
        (RETRIEVAL[1:], "training.evaluate_suites_every: 2, without training.evaluate_suites; name them"),
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
            "retrieval.lengths: 1024, and the model takes 512 tokens at most; give shorter ones",
        ),
        (
            [*RETRIEVAL, "retrieval=64"],
            "retrieval: is a section, not a field; set one of its fields: retrieval.FIELD=...",
        ),
        ([*RETRIEVAL, "retrieval.length=[64]"], "retrieval.length: no such field; did you mean lengths?"),
        ([*RETRIEVAL, "retrieval.samples=0"], "retrieval.samples: 0 is out of range; give a value greater than 0"),
        (
            [*RETRIEVAL, *OPTIONS, "fewshot.limit=3"],
            "fewshot.limit: is of a suite that training.evaluate_suites does not name; add fewshot there",
        ),
        (
            ["training.evaluate_suites=[fewshot]", RETRIEVAL[1], "fewshot.data=/nowhere"],
            "fewshot.data: /nowhere is no folder; name one",
        ),
        ([*RETRIEVAL, *OPTIONS], "retrieval.lengths: 64 does not fit for passkey: the shortest one takes "),
        (
            [*RETRIEVAL, "retrieval.lengths=[512]", "retrieval.haystack=/nowhere"],
            "retrieval.haystack: /nowhere does not exist; name a file",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_the_first_step(
    capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path, arguments: list[str], line: str
) -> None:
    assert call(write_config(tmp_path, data, tmp_path), *RUN, *arguments) == 2
    assert f"selectron: error: {line}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
