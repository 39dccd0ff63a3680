"""Suites between steps with layouts that shard samples, sequences or weights: answers equal those of one process.

A model this small finds nothing, so all scores are 0. Only the generated texts distinguish models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import covering
import pytest
import whole_run
from corpora import prepared
from launching import TP2, curve, records, write_config

pytestmark = pytest.mark.slow

RUN = [
    *("training.steps=2", "optimizer.warmup_steps=1", "training.evaluate_every=0", "training.checkpoint_every=0"),
    # A large spread of initial weights and large steps make the generated text differ between prompts and steps.
    # The large epsilon suppresses gradients that are only rounding noise.
    *("model.pattern=top1_chunk,gated_deltanet", "model.max_position_embeddings=512", "model.init_std=0.5"),
    *("optimizer.lr=0.1", "optimizer.min_lr=0.1", "optimizer.epsilon=1e-3"),
]
CP2, ZERO2, ZERO3 = ["parallel.context=2"], ["optimizer.sharding=zero2"], ["optimizer.sharding=zero3"]
SUITES = [
    *("training.evaluate_suites=[retrieval]", "training.evaluate_suites_every=1"),
    # Two ranks cannot divide three samples of a task evenly.
    *("retrieval.tasks=[passkey, selective_copying]", "retrieval.lengths=[512]", "retrieval.depths=[0.5]"),
    "retrieval.samples=3",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("suites"), documents=60)


@pytest.fixture(scope="module")
def alone(pool: Any, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(pool, data, tmp_path_factory.mktemp("alone"), [*RUN, *SUITES], 1)


def trained(pool: Any, data: Path, folder: Path, options: list[str], processes: int) -> Path:
    """Train, and return the folder of the finished run."""
    folder.mkdir(exist_ok=True)
    pool.run(whole_run.run, processes, write_config(folder, data, folder), options)
    return folder / "run"


def answers(run: Path, step: int) -> list[tuple[str, int, float, str | None]]:
    """Return task, index, score and generated text of every sample."""
    found = json.loads((run / "evaluation" / f"step_{step}" / "retrieval.json").read_text())
    return [(one["task"], one["index"], one["score"], one["generated"]) for one in found["records"]]


LAYOUTS = {
    "dp2": [],
    "cp2": CP2,
    "tp2_sp": TP2,
    "zero2_dp2": ZERO2,
    "zero3_dp2": ZERO3,
    "zero3_tp2_sp": [*TP2, *ZERO3],
    "zero3_cp2": [*CP2, *ZERO3],
}
# The first shards the tensors of each layer. The others shard all weights, and samples or sequences. With sharded
# weights every rank takes part in every forward pass, even if it has fewer samples than others.
DEFAULT_LAYOUTS = ["tp2_sp", "zero3_dp2", "zero3_cp2"]


@pytest.mark.parametrize("name", covering.cases(LAYOUTS, DEFAULT_LAYOUTS))
def test_answers_are_those_of_one_process_and_training_goes_on_undisturbed(
    pool: Any, data: Path, tmp_path: Path, alone: Path, name: str
) -> None:
    layout = LAYOUTS[name]
    tested = trained(pool, data, tmp_path / "tested", [*RUN, *layout, *SUITES], 2)
    plain = trained(pool, data, tmp_path / "plain", [*RUN, *layout], 2)
    assert curve(tested) == curve(plain)  # losses, norms and learning rates, bit for bit
    assert (tested / "model.json").read_bytes() == (alone / "model.json").read_bytes()
    for step in (1, 2):
        assert answers(tested, step) == answers(alone, step)
    scores = [(one["step"], one["scores"]) for one in records(alone, "suites.jsonl")]
    assert [(one["step"], one["scores"]) for one in records(tested, "suites.jsonl")] == scores
    assert [step for step, _ in scores] == [1, 2]


def test_the_size_of_the_model_is_kept(data: Path, alone: Path) -> None:
    size = json.loads((alone / "model.json").read_text())
    tokens = json.loads((data / "manifest.json").read_text())["tokenizer"]["vocab_size"]
    assert size["embedding_parameters"] == size["output_layer_parameters"] == -(-tokens // 128) * 128 * 32
    assert size["parameters"] > 2 * size["embedding_parameters"] + 2 * 4 * 32 * 32


def test_what_is_compared_differs(alone: Path) -> None:
    """Answers differ between prompts and between steps. Otherwise those of any model would pass."""
    first, second = answers(alone, 1), answers(alone, 2)
    assert first != second
    assert len({text for _, _, _, text in first if text is not None}) > 2
