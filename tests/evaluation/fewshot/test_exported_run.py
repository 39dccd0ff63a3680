"""Few-shot results of a run, compared with lm-eval's own Hugging Face model of the exported folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import of_a_run
import pytest
from corpora import prepared
from launching import TP2, call_command, environment, write_config
from lm_eval.models.huggingface import HFLM
from lm_evals import DEFINITIONS, definitions, lm_evals_numbers, same
from questions import write_questions
from small_model import END, small_tokenizer
from tokenizers import Tokenizer, processors

from megatron_ext.evaluation.fewshot.options import FewshotOptions

pytestmark = pytest.mark.slow

LIMIT = 10
STEPS = 2
RUN = [
    # Some questions are longer than the maximum length, so their beginnings are truncated.
    *("model.pattern=attention*2", "model.max_position_embeddings=256", "training.evaluate_every=0"),
    # A large spread of initial weights and large steps make the answers differ, also between steps.
    *("model.init_std=0.3", "optimizer.lr=0.05", "optimizer.min_lr=0.05", "optimizer.warmup_steps=1"),
    *(f"training.steps={STEPS}", "training.checkpoint_every=1"),
]
Numbers = dict[tuple[str, str, str], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the questions in `published` and `columns`, as `write_questions` writes them."""
    folder = tmp_path_factory.mktemp("exported")
    write_questions(folder / "published", folder / "columns", rows=LIMIT + 2)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path, pool: Any) -> Path:
    """Folder of a run whose tokenizer has a template that can prepend a token to every text."""
    tokenizer = small_tokenizer(["karalo mitin pera nusto lovel"] * 20)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    data = prepared(folder, documents=60, tokenizer=str(folder / "tokenizer.json"))
    pool.run(of_a_run.learn, 1, write_config(folder, data, folder), RUN)
    return folder / "run"


@pytest.fixture(scope="module")
def theirs(folder: Path, run: Path) -> Numbers:
    """Results of lm-eval's own model, loaded from the exported folder."""
    assert call_command("convert", str(run), str(folder / "hf"), "--to", "hf") == 0
    # A platform selected earlier has set variables for DeepSpeed. They would make lm-eval look for other ranks.
    with patch.dict(os.environ, environment(), clear=True):
        own = HFLM(pretrained=str(folder / "hf"), device="cpu", batch_size=1)
    assert type(own.model).__name__ == "LlamaForCausalLM"
    assert Tokenizer.from_file(str(run / "tokenizer.json")).encode("a").ids[0] == 0  # the template prepends a token
    assert own.tokenizer("a")["input_ids"] == own.tokenizer("a", add_special_tokens=False)["input_ids"]
    return lm_evals_numbers(own, list(DEFINITIONS), definitions(folder), limit=LIMIT)


def numbers_of(output: Path) -> Numbers:
    """Read the metrics from fewshot.json."""
    numbers: Numbers = {}
    tasks = json.loads((output / "fewshot.json").read_text())["tasks"]
    for task, found in tasks.items():
        assert found["rows"] == LIMIT
        for metric in found["metrics"]:
            numbers[task, metric["name"], metric["filter"]] = metric["value"]
            numbers[task, f"{metric['name']}_stderr", metric["filter"]] = metric["stderr"]
    return numbers


def test_numbers_of_the_command_are_lm_evals_own(
    run: Path, folder: Path, theirs: Numbers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    options = [f"fewshot.data={folder / 'published'}", f"fewshot.limit={LIMIT}", "--output", str(output)]
    assert call_command("evaluate", str(run), "--suite", "fewshot", *options) == 0
    same(numbers_of(output), theirs)
    told = json.loads((output / "fewshot.json").read_text())
    assert told["step"] == STEPS
    assert 0 < told["truncated"] < told["asked"]
    assert capsys.readouterr().out.endswith((output / "fewshot.md").read_text() + "\n")


@pytest.mark.parametrize(
    "layout",
    [TP2, ["parallel.pipeline=2"], ["parallel.context=2"], ["parallel.context=1"]],
    ids=["tp2_sp", "pp2", "cp2", "dp2"],
)
def test_two_processes_find_the_same(
    layout: list[str], run: Path, folder: Path, theirs: Numbers, pool: Any, tmp_path: Path
) -> None:
    options = FewshotOptions(data=folder / "published", limit=LIMIT)
    pool.run(of_a_run.answer, 2, run, STEPS, options, layout, tmp_path / "out")
    same(numbers_of(tmp_path / "out"), theirs)


def test_another_step_has_other_numbers(run: Path, folder: Path, theirs: Numbers, pool: Any, tmp_path: Path) -> None:
    """Compare with an earlier step, because the results of any model might pass."""
    options = FewshotOptions(data=folder / "published", limit=LIMIT)
    pool.run(of_a_run.answer, 1, run, STEPS - 1, options, [], tmp_path / "out")
    earlier = numbers_of(tmp_path / "out")
    accuracies = [key for key in theirs if not key[1].endswith("_stderr")]
    assert sum(earlier[key] != theirs[key] for key in accuracies) >= len(accuracies) / 4
