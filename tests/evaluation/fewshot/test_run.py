"""The few-shot suite as a command: output, files, errors, and files that stay unchanged."""

from __future__ import annotations

import json
import random
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import covering
import lm_eval.tasks.manager
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lm_evals import LM_EVAL_TASKS
from questions import write_questions
from small_model import MAX_LENGTH, PlainModel, small_llama, small_tokenizer

from megatron_ext.config.validate import validate
from megatron_ext.evaluation.fewshot import tasks
from megatron_ext.evaluation.fewshot.adapter import GenerationSettings, parse_generation_settings
from megatron_ext.evaluation.fewshot.options import FewshotOptions
from megatron_ext.evaluation.fewshot.results import write_results
from megatron_ext.evaluation.fewshot.run import evaluate_fewshot
from megatron_ext.evaluation.text_model import SamplingParameters
from megatron_ext.utils.errors import UserError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_questions(folder / "published", folder / "columns")
    return folder / "published"


@pytest.fixture
def model(data: Path) -> PlainModel:
    tokenizer = small_tokenizer([path.read_text() for path in sorted(data.rglob("*.jsonl"))])
    return PlainModel(small_llama(tokenizer.get_vocab_size()), tokenizer)


def own_task(folder: Path, name: str = "own", more: str = "") -> FewshotOptions:
    (folder / "rows.txt").write_text("the kettle rolls\nunder the ladder\n")
    (folder / f"{name}.yaml").write_text(
        f"task: {name}\noutput_type: generate_until\ntest_split: train\ndoc_to_text: '{{{{text}}}}'\n"
        f"doc_to_target: '{{{{text}}}}'\ndataset_path: text\n"
        f"dataset_kwargs: {{data_files: {folder}/rows.txt, cache_dir: {folder}/cache}}\n{more}"
    )
    return FewshotOptions(tasks=(name,), include_path=folder)


def test_results_are_written_for_machines_and_readers(model: PlainModel, data: Path, tmp_path: Path) -> None:
    results = evaluate_fewshot(model, FewshotOptions(tasks=("boolq", "piqa"), data=data, limit=5))
    assert results is not None
    write_results(results, {"step": 7}, tmp_path)
    numbers = json.loads((tmp_path / "fewshot.json").read_text())
    assert numbers["step"] == 7
    piqa = numbers["tasks"]["piqa"]
    assert {metric["name"]: metric["higher_is_better"] for metric in piqa["metrics"]} == {"acc": True, "acc_norm": True}
    assert (piqa["version"], piqa["rows"], piqa["rows_there"], piqa["num_fewshot"]) == (1.0, 5, 6, 0)
    assert piqa["sources"] == {"validation": str(data / "piqa" / "valid.jsonl")}
    assert numbers["lm_eval"].startswith("0.4.")
    assert (numbers["asked"], numbers["settings"]["seed"]) == (20, 1234)
    lines = (tmp_path / "fewshot.md").read_text().splitlines()
    accuracy = piqa["metrics"][0]
    assert f"| piqa | 1.0 | 0 | 5 of 6 | none | acc | {accuracy['value']:.4f} | {accuracy['stderr']:.4f} |" in lines
    assert f"{numbers['truncated']} of 20 texts exceeded" in lines[0]
    assert numbers["truncated"] > 0


def test_local_tasks_ask_no_network_and_leave_random_numbers_alone(
    model: PlainModel, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    expected = [float(torch.rand(1)), np.random.rand(), random.random()]
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    evaluate_fewshot(model, FewshotOptions(data=data, num_fewshot=1, limit=2))
    assert [float(torch.rand(1)), np.random.rand(), random.random()] == expected


def test_every_rank_asks_the_same_and_the_first_one_speaks(
    model: PlainModel, data: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = FewshotOptions(tasks=("hellaswag", "arc_easy"), data=data, num_fewshot=1)
    found, asked, said = [], [], []
    for rank in (0, 1):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        model.asked.clear()
        found.append(evaluate_fewshot(model, options))
        asked.append(list(model.asked))
        said.append("".join(capfd.readouterr()))
    assert asked[0] == asked[1]
    assert sum(len(requests) for requests in asked[0]) > 20
    assert found[0] is not None
    assert found[1] is None
    assert said[0]
    assert not said[1]


@pytest.fixture
def some_definitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only a few of lm-eval's definitions by default. It reads 14,000 files otherwise, which takes ten seconds."""
    if not covering.EXHAUSTIVE:
        for name in ("arc", "winogrande"):
            shutil.copytree(LM_EVAL_TASKS / name, tmp_path / "tasks" / name)
        monkeypatch.setattr(lm_eval.tasks.manager, "__file__", str(tmp_path / "tasks" / "manager.py"))
    tasks._all_definitions.cache_clear()
    yield
    tasks._all_definitions.cache_clear()


@pytest.mark.usefixtures("some_definitions")
def test_a_tag_is_its_tasks_and_a_name_that_is_none_is_answered_by_others(model: PlainModel, data: Path) -> None:
    """Reads lm-eval's definitions, as any lm-eval task without a local definition does."""
    results = evaluate_fewshot(model, FewshotOptions(tasks=("ai2_arc",), data=data, limit=2))
    assert results is not None
    assert [(task.name, set(task.sources)) for task in results.tasks] == [
        ("arc_challenge", {"test"}),
        ("arc_easy", {"test"}),
    ]
    with pytest.raises(UserError, match=r"no task, group or tag 'wino_grande'; did you mean .*winogrande"):
        evaluate_fewshot(model, FewshotOptions(tasks=("piqa", "wino_grande"), data=data))
    assert "lm-eval ls tasks" in str(refused(model, FewshotOptions(tasks=("%",), data=data)))


def refused(model: PlainModel, options: FewshotOptions) -> UserError:
    model.asked.clear()
    with pytest.raises(UserError) as caught:
        evaluate_fewshot(model, options)
    assert not model.asked
    assert "\n" not in str(caught.value)
    return caught.value


def test_too_few_examples_and_files_that_are_missing(model: PlainModel, data: Path, tmp_path: Path) -> None:
    error = refused(model, FewshotOptions(tasks=("piqa",), data=data, num_fewshot=6))
    assert "6 examples before each question, of the 6 in" in error.problem
    error = refused(model, FewshotOptions(tasks=("piqa", "boolq"), data=tmp_path))
    assert str(tmp_path / "piqa" / "valid.jsonl") in error.problem
    assert "https://" in error.hint
    error = refused(model, FewshotOptions(tasks=("piqa",), data=data, include_path=tmp_path / "nowhere"))
    assert error.where == "fewshot.include_path"


def test_rows_that_cannot_be_read(model: PlainModel, tmp_path: Path) -> None:
    options = own_task(tmp_path)
    (tmp_path / "rows.txt").unlink()
    assert "rows could not be read (own)" in refused(model, options).problem


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("generation_kwargs: {do_sample: true, max_gen_toks: 4, temperature: 0}\n", "sets temperature=0"),
        ("generation_kwargs: {temperature: 0.7, max_gen_toks: 4, top_p: 1.5}\n", "sets top_p=1.5"),
        ("generation_kwargs: {do_sample: true, max_gen_toks: 4, top_k: -1}\n", "sets top_k=-1"),
        (
            "generation_kwargs: {do_sample: true, max_gen_toks: 4, typical_p: 0.2}\n",
            "unsupported option: typical_p=0.2",
        ),
        ("generation_kwargs: {do_sample: true, num_beams: 4}\n", "unsupported option: do_sample=True, num_beams=4"),
        ("generation_kwargs: {num_beams: 4, length_penalty: 2.0}\n", "unsupported option: length_penalty=2.0"),
        ("generation_kwargs: {num_beams: 0, max_gen_toks: 4}\n", "sets num_beams=0"),
        ("generation_kwargs: {until: ['x']}\n", f"up to 256 tokens, but the model supports {MAX_LENGTH}"),
        ("generation_kwargs: {until: ['x'], max_gen_toks: 4}\nunsafe_code: true\n", "runs code"),
        ("generation_kwargs: {until: ['x'], max_gen_toks: 4}\ndoc_to_image: text\n", "uses images"),
    ],
)
def test_what_a_text_model_does_not_do_is_refused_before_it_is_asked(
    more: str, said: str, model: PlainModel, tmp_path: Path
) -> None:
    assert said in refused(model, own_task(tmp_path, more=more)).problem


JUDGE = """
def ran(references, predictions):
    found = {}
    exec("answer = len(" + repr(predictions[0]) + ")", found)
    return float(found["answer"] > 0)
"""
RUNS_CODE = """unsafe_code: true
generation_kwargs: {until: [], max_gen_toks: 4}
metric_list: [{metric: !function judge.ran, aggregation: mean, higher_is_better: true}]
"""


def test_a_task_that_runs_code_runs_with_leave(model: PlainModel, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    options = own_task(tmp_path, more=RUNS_CODE)
    assert "set fewshot.confirm_run_unsafe_code=true if it may run" in refused(model, options).hint
    results = evaluate_fewshot(model, replace(options, confirm_run_unsafe_code=True))
    assert results is not None
    assert [metric.value for metric in results.tasks[0].metrics] == [1.0]
    assert results.settings["confirm_run_unsafe_code"]


@pytest.mark.parametrize(
    ("code", "said", "hint"),
    [
        ("import no_such_package\n", "a package is missing (own): No module named 'no_such_package'", "install it"),
        ("int('x')\n", "ValueError in the task's definition (own): invalid literal", "fix the task"),
    ],
)
def test_a_task_whose_code_fails_is_named(code: str, said: str, hint: str, model: PlainModel, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(code + JUDGE)
    error = refused(model, own_task(tmp_path, more=RUNS_CODE))
    assert said in error.problem
    assert hint in error.hint


def test_arguments_that_are_greedy_all_the_same() -> None:
    given = {"until": "x", "do_sample": False, "temperature": 0.8, "top_p": 0.95, "num_beams": 1, "max_new_tokens": 9}
    generation = parse_generation_settings(given, 64)
    assert generation == GenerationSettings(("x",), 9)


def test_what_a_task_leaves_out_of_a_draw_is_as_transformers_has_it() -> None:
    given = {"until": "x", "do_sample": True, "temperature": 0.8, "max_gen_toks": 9, "top_p": None}
    assert parse_generation_settings(given, 64).sampling == SamplingParameters((), 0.8, 50, 1.0, 0.0)
    sampling = parse_generation_settings(given | {"top_k": 0, "min_p": 0.1}, 64).sampling
    assert sampling == SamplingParameters((), 0.8, None, 1.0, 0.1)


def test_a_task_that_takes_no_examples_takes_none(model: PlainModel, tmp_path: Path) -> None:
    options = own_task(tmp_path, more="num_fewshot: 0\ngeneration_kwargs: {until: ['x'], max_gen_toks: 4}\n")
    results = evaluate_fewshot(model, FewshotOptions(tasks=options.tasks, include_path=tmp_path, num_fewshot=1))
    assert results is not None
    assert results.tasks[0].num_fewshot == 0


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"tasks": []}, "fewshot.tasks"),
        ({"limit": 0}, "fewshot.limit"),
        ({"num_fewshot": -1}, "fewshot.num_fewshot"),
        ({"split": "validation"}, "fewshot.split"),
    ],
)
def test_options_that_mean_nothing(given: dict[str, Any], where: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(FewshotOptions, given, prefix="fewshot.")
    assert caught.value.where == where


def test_an_answer_longer_than_the_model_takes_is_reported(model: PlainModel, tmp_path: Path) -> None:
    options = own_task(tmp_path)
    (tmp_path / "own.yaml").write_text((tmp_path / "own.yaml").read_text().replace("generate_until", "loglikelihood"))
    (tmp_path / "rows.txt").write_text("#" * (MAX_LENGTH + 1))
    error = refused(model, options)
    assert f"a continuation of {MAX_LENGTH + 1} tokens" in error.problem
    assert f"1 to {MAX_LENGTH} tokens" in error.hint


def test_a_group_is_its_tasks_together(model: PlainModel, tmp_path: Path) -> None:
    """The group's score is lm-eval's mean weighted by rows, for one task with two rows and one with a single row."""
    greedy = "generation_kwargs: {until: ['x'], max_gen_toks: 4}\nmetric_list: [{metric: acc}]\n"
    for name in ("full", "none"):
        own_task(tmp_path, name, f"{greedy}process_results: !function scored.{name}\n")
    definition = tmp_path / "none.yaml"
    definition.write_text(definition.read_text().replace("rows.txt", "row.txt"))
    (tmp_path / "row.txt").write_text("often\n")
    (tmp_path / "scored.py").write_text(
        "def full(doc, found):\n    return {'acc': 1.0}\ndef none(doc, found):\n    return {'acc': 0.0}\n"
    )
    (tmp_path / "pair.yaml").write_text("group: pair\ntask: [full, none]\naggregate_metric_list: [{metric: acc}]\n")
    results = evaluate_fewshot(model, FewshotOptions(tasks=("pair",), include_path=tmp_path))
    assert results is not None
    found = {task.name: (task.rows, task.metrics[0].value) for task in results.tasks}
    assert found == {"pair": (None, pytest.approx(2 / 3)), "full": (2, 1.0), "none": (1, 0.0)}


def test_without_lm_eval_one_line_says_how_to_get_it(model: PlainModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_ext.evaluation.fewshot.run.find_spec", lambda name: None)
    assert "pip install 'selectron[eval]'" in str(refused(model, FewshotOptions()))
