"""Counts of models built on the meta device, compared with hand counts and with real runs of all layouts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import counted_run
import pytest
from corpora import prepared
from launching import TP2, write_config

from megatron_ext.config.derive import derive
from megatron_ext.config.load import load_config
from megatron_ext.config.schema import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.planning import counts
from megatron_ext.planning.counts import ModelCounter, ModelCounts
from megatron_ext.planning.vocabulary import vocab_size
from megatron_ext.utils.errors import UserError

EXAMPLES = Path(__file__).parents[2] / "examples"
HIDDEN, HEADS, FFN, LENGTH, ROWS = 32, 4, 48, 16, 384  # rows of the embedding: 300 tokens, padded to multiples of 128


def attention(**changes: Any) -> RunConfig:
    model = ModelConfig(
        pattern="attention*2", hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=FFN, **changes
    )
    return derive(RunConfig(data=DataConfig(path="none", seq_length=LENGTH), model=model))


@pytest.mark.parametrize("tied", [False, True])
def test_attention_counts_by_hand(counter: ModelCounter, tied: bool) -> None:
    weights = 3 * HIDDEN * HIDDEN + HIDDEN * HIDDEN + 3 * HIDDEN * FFN
    embeddings = ROWS * HIDDEN * (1 if tied else 2)
    pairs = sum(1 for t in range(LENGTH) for s in range(LENGTH) if s <= t) / LENGTH
    found = counter(attention(tie_embeddings=tied))
    assert found.parameters == 2 * (weights + 2 * HIDDEN) + HIDDEN + embeddings
    # One multiply-add per weight, and per channel of each query-key pair for its score and for its value. The
    # backward pass costs twice as much.
    assert found.flops_per_token == pytest.approx(6 * (2 * weights + ROWS * HIDDEN) + 2 * 3 * pairs * 4 * HIDDEN)


class Process:
    """Stand-in for the process that builds models. It counts the models that it is asked to build."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.configs: list[RunConfig] = []

    def submit(self, _: Any, config: RunConfig, vocab_size: int) -> Process:
        self.configs.append(config)
        return self

    def result(self) -> ModelCounts:
        return ModelCounts(len(self.configs), 1.0)

    def shutdown(self) -> None: ...


def test_counts_are_cached_by_model() -> None:
    paths: list[str] = []

    def find_vocab_size(path: str, cache_dir: str | None) -> int:
        paths.append(path)
        return 300 if path == "none" else 400

    plain = attention()
    same = replace(
        plain,
        parallel=ParallelConfig(tensor=2),
        optimizer=OptimizerConfig(lr=1.0),
        mixers={"mamba2": {}},  # used by no layer
        training=replace(plain.training, seed=5, steps=7),
        run=replace(plain.run, name="x", backend="transformer_engine"),
    )
    others = [
        attention(tie_embeddings=True),
        replace(plain, mixers={"attention": {"window": 4}}),
        replace(plain, data=DataConfig(path="none", seq_length=32)),
        replace(plain, data=DataConfig(path="more", seq_length=LENGTH)),
    ]
    with patch.object(counts, "ProcessPoolExecutor", Process), ModelCounter(find_vocab_size) as counter:
        assert [counter(one).parameters for one in (plain, same, plain)] == [1, 1, 1]
        assert [counter(one).parameters for one in (*others, *others)] == [2, 3, 4, 5] * 2
    assert paths == ["none", "more"]


def test_large_model_allocates_no_memory(counter: ModelCounter) -> None:
    config = load_config(EXAMPLES / "1p3b_100k.yaml", [], load_all())
    counter(attention())  # start the process
    before = peak_memory(counter)
    found = counter(config)
    width, layers, ffn = 2048, 24, 5504
    layer = 4 * width * width + 3 * width * ffn + 2 * width
    assert found.parameters == layers * layer + width + 2 * 384 * width
    assert peak_memory(counter) - before < found.parameters / 8


def peak_memory(counter: ModelCounter) -> int:
    """Peak resident memory of the process that builds models. `getrusage` would include the parent's memory."""
    assert counter._process is not None
    status = counter._process.submit(Path("/proc/self/status").read_text).result()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


def test_missing_data(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        vocab_size(str(tmp_path), None)
    problem = f"there is no prepared data in {tmp_path} on this machine, but the model's size depends on its tokenizer"
    assert str(caught.value) == f"data.path: {problem}; prepare the data, or copy its manifest.json there"


ONE_STEP = [
    *("training.steps=1", "optimizer.warmup_steps=0", "training.evaluate_every=0", "training.checkpoint_every=0"),
    "training.precision=bf16",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("counted"), documents=60)


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (1, []),
        pytest.param(4, [*TP2, "parallel.pipeline=2", "model.tie_embeddings=true"], marks=pytest.mark.slow),
        pytest.param(2, ["parallel.context=2", "optimizer.sharding=zero1"], marks=pytest.mark.slow),
        pytest.param(2, ["optimizer.sharding=zero3"], marks=pytest.mark.slow),
    ],
    ids=["alone", "tp2_pp2", "cp2_zero1", "zero3"],
)
@pytest.mark.usefixtures("shared_counting_process")
def test_counts_equal_those_of_run(pool: Any, data: Path, tmp_path: Path, processes: int, layout: list[str]) -> None:
    path, overrides = write_config(tmp_path, data, tmp_path), [*ONE_STEP, *layout]
    flops = pool.run(counted_run.flops_per_token, processes, path, overrides)
    with ModelCounter() as counter:
        found = counter(load_config(path, overrides, load_all()))
    assert found.parameters == json.loads((tmp_path / "run" / "model.json").read_text())["parameters"]
    assert flops == [pytest.approx(found.flops_per_token, rel=1e-12)] * processes


MODELS = sorted((EXAMPLES / "models" / "1p3b").glob("*.yaml"))


@pytest.mark.parametrize("path", MODELS, ids=[path.stem for path in MODELS])
def test_example_models_have_parameters_of_transformer(counter: ModelCounter, path: Path) -> None:
    big = EXAMPLES / "1p3b_100k.yaml"
    one = ["parallel.tensor=1", "parallel.sequence=false", "parallel.context=1"]
    attention = derive(load_config(big, [*one, "model.pattern=attention*24"], load_all()))
    config = derive(load_config(big, [str(path), *one], load_all()))
    assert config.run.name == f"{path.stem}_1p3b_100k"
    assert counter(config).parameters == pytest.approx(counter(attention).parameters, rel=0.02)
