"""First lines of a run's log."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.config.derive import derive
from megatron_ext.config.schema import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron_ext.parallel.parameters import ParameterCount
from megatron_ext.platform.device import Platform
from megatron_ext.training.header import format_header
from megatron_ext.training.run_context import RunContext

CPU = Platform(torch.device("cpu"), "gloo")
SIZE = ParameterCount(parameters=5_000, embedding_parameters=1_000, output_layer_parameters=1_200)


def _data(train: list[str], test: list[str]) -> Any:
    entries = [
        SimpleNamespace(split=split, domain=domain, tokens=tokens)
        for split, domain, tokens in (
            ("train", "A", 3_000),
            ("train", "B", 1_000),
            ("train", "C", 7),
            ("test", "A", 50),
        )
    ]
    return SimpleNamespace(manifest=SimpleNamespace(domains=entries), train_domains=train, test_domains=test)


def _config(**parallel: int) -> RunConfig:
    training = TrainingConfig(steps=100, global_batch_size=8, micro_batch_size=2, precision="fp32")
    data, model = DataConfig(path="there", seq_length=20), ModelConfig(pattern="attention*4")
    return derive(RunConfig(data=data, model=model, training=training, parallel=ParallelConfig(**parallel)))


def _header(config: RunConfig, data: Any, world_size: int, step: int = 0) -> list[str]:
    return format_header(RunContext(config, Path("runs/a"), CPU), data, SIZE, Progress(step), world_size).splitlines()


def test_header() -> None:
    assert _header(_config(tensor=2, context=2), _data(["A", "B"], ["C"]), 8) == [
        "run       runs/a, from the start to step 100",
        "model     attention*4: 5,000 parameters, 2,200 of them in embedding and output layer; fp32",
        "layout    8 processes: tensor 2, sequence parallel, context 2, data 2; 2 x 2 samples per replica and step, "
        "on cpu",
        "data      there: 4,000 tokens of A, B",
        "tested on C",
        "tokens    8 samples of 20 per step, 16,000 in total: 4 times the data",
        "results   metrics.jsonl, evaluation.jsonl, tensorboard/ and checkpoints/ in runs/a",
    ]


def test_one_process_continues_with_many_domains() -> None:
    lines = _header(_config(), _data([*"ABCDEFGH"], []), 1, step=40)
    assert lines[0] == "run       runs/a, from step 40 to step 100"
    assert lines[2] == "layout    1 process: data 1; 4 x 2 samples per replica and step, on cpu"
    assert lines[3] == "data      there: 4,007 tokens of A, B, C, D, E, F and 2 more"
    assert lines[4] == "tested on validation text of the same domains only"


def test_a_domain_cannot_write_to_the_terminal() -> None:
    (line,) = [line for line in _header(_config(), _data(["A"], ["\x1b[31m"]), 1) if line.startswith("tested")]
    assert line == "tested on \\x1b[31m"
