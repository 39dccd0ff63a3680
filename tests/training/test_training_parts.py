"""The parts of training that are arithmetic: who reads what, what identifies a run, what a step's metrics say."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from data_prep.manifest import Manifest, TokenizerEntry
from megatron_ext.checkpoint.folder import Progress
from megatron_ext.config.derive import derive
from megatron_ext.config.effects import flat
from megatron_ext.config.layout import layout_of
from megatron_ext.config.schema import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig
from megatron_ext.config.schema import TrainingConfig as Training
from megatron_ext.data.datasets import RunData, step_batches
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.optim.schedule import make_schedule
from megatron_ext.runs.identity import identity
from megatron_ext.training.loop import TrainingLoop
from megatron_ext.training.resilience.stopping import StopRequest
from megatron_ext.training.trainer import StepResult
from megatron_ext.utils.errors import UserError

LENGTH = 12


class NumberedSamples:
    """Fake samples: sample i is [100 i, 100 i + 1, ...], so that each token identifies its origin."""

    seq_length = LENGTH

    def __getitem__(self, index: int) -> np.ndarray:
        return 100 * index + np.arange(LENGTH + 1)


def a_config(**training: Any) -> RunConfig:
    return derive(
        RunConfig(
            data=DataConfig(path="data", seq_length=LENGTH),
            model=ModelConfig(pattern="attention,top1_chunk", hidden_size=16, num_attention_heads=2),
            mixers={"top1_chunk": {"chunk_size": 4}, "gated_deltanet": {"conv_size": 4}},
            training=Training(**{"global_batch_size": 8, "micro_batch_size": 2, **training}),
        )
    )


# --- who reads what --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_ranks_together_read_each_sample_once(dp_size: int, cp_size: int) -> None:
    config = replace(a_config(), parallel=ParallelConfig(context=cp_size))
    layout = layout_of(config, dp_size * cp_size)
    inputs, labels = [], []
    for dp_rank in range(dp_size):
        for cp_rank in range(cp_size):
            samples = cast(TrainingSamples, NumberedSamples())
            batches = step_batches(
                samples, 24, config.training, layout, dp_rank=dp_rank, cp_rank=cp_rank, cp_size=cp_size
            )
            assert len(batches) == layout.num_micro_batches == 8 // (2 * dp_size)
            for batch in batches:
                assert batch.tokens.shape == (2, LENGTH // cp_size)
                assert torch.equal(batch.position_ids, batch.tokens % 100)
                inputs += batch.tokens.flatten().tolist()
                labels += batch.labels.flatten().tolist()
    first_of = [100 * index for index in range(24, 32)]
    assert sorted(inputs) == [first + place for first in first_of for place in range(LENGTH)]
    assert sorted(labels) == [first + place for first in first_of for place in range(1, LENGTH + 1)]


# --- what identifies a run -------------------------------------------------------------------------------------------


def run_data(sha256: str = "a" * 64) -> RunData:
    tokenizer = TokenizerEntry("tokenizer.json", sha256, 300, "<|endoftext|>", 0)
    manifest = Manifest.__new__(Manifest)
    object.__setattr__(manifest, "tokenizer", tokenizer)
    samples = cast(TrainingSamples, None)
    record = {"train": "text"}
    return RunData(Path("data"), manifest, Path("tokenizer.json"), ["First"], ["Other"], samples, record=record)


def test_checkpoint_records_the_runs_identity() -> None:
    """The model at the top, for readers without a configuration; all fields; and what the domains' names mean."""
    config = a_config()
    base = identity(config, run_data())
    assert base["model.hidden_size"] == 16
    assert base["mixers.top1_chunk.chunk_size"] == 4
    assert base["config"] == flat(config)
    assert not any("gated_deltanet" in field for field in (*base, *base["config"]))
    assert base["data"] == {"train": "text"}
    assert identity(config, run_data("b" * 64))["data.tokenizer"] == "b" * 64
    weighted = replace(run_data(), weights={"First": 1.0})
    assert identity(config, weighted)["data.weights"] == {"First": 1.0}
    assert base["data.weights"] is None  # as a checkpoint from before there were weights says by saying nothing


# --- what a step's metrics say ---------------------------------------------------------------------------------------


A_STEP = StepResult(loss=2.5, tokens=1000, predicted=990, grad_norm=0.5, is_local_loss_finite=True)


def a_loop(peak_flops: float | None) -> TrainingLoop:
    nothing = cast(Any, None)
    return TrainingLoop(
        trainer=nothing,
        samples=nothing,
        evaluator=nothing,
        store=nothing,
        recovery=nothing,
        stragglers=nothing,
        heartbeat=nothing,
        training=Training(steps=10),
        layout=nothing,
        records=nothing,
        flops_per_token=3e6,
        peak_flops=peak_flops,
        progress=Progress(step=7, samples=56, tokens=7000),
        last_evaluation=5,
    )


def test_metrics_by_hand() -> None:
    found = a_loop(peak_flops=2e9)._metrics(A_STEP, 1e-3, 4.0, 123)
    # 1000 tokens in 4 s are 250 a second; at 3e6 FLOPs each, 7.5e8 of 2e9 a second.
    assert found == {
        "step": 7,
        "tokens": 7000,
        "predicted_tokens": 990,
        "loss": 2.5,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens_per_second": 250.0,
        "mfu": 0.375,
        "peak_memory": 123,
    }


def test_mfu_is_unknown_without_a_peak() -> None:
    found = a_loop(peak_flops=None)._metrics(A_STEP, 1e-3, 4.0, 123)
    assert found["mfu"] is None


@pytest.mark.parametrize(
    ("every", "step", "finished", "due"),
    [(0, 10, True, False), (5, 5, False, True), (5, 6, False, False), (5, 7, True, True), (1, 7, False, True)],
)
def test_evaluation_and_checkpoint_intervals(every: int, step: int, finished: bool, due: bool) -> None:
    loop = a_loop(None)
    loop.progress = Progress(step=step)
    assert loop._is_due(every, finished) == due


class ScriptedLoop(TrainingLoop):
    """Steps and evaluations that only leave their number; asked to stop after the steps in `stops`."""

    stops: set[int]
    actions: list[str]

    def _step(self, stop: StopRequest) -> bool:
        self.progress = Progress(step=self.progress.step + 1)
        return self.progress.step in self.stops

    def _evaluate(self) -> None:
        self.actions.append(f"evaluation {self.progress.step}")


def scripted(first: int, last_evaluation: int, stops: set[int]) -> ScriptedLoop:
    plain = a_loop(None)
    loop = ScriptedLoop(**{field.name: getattr(plain, field.name) for field in fields(plain)})
    loop.stops, loop.actions = stops, []
    loop.training = Training(steps=7, evaluate_every=3, checkpoint_every=2)
    loop.progress, loop.last_evaluation = Progress(step=first), last_evaluation
    loop.trainer = cast(Any, SimpleNamespace(optimizer=None))
    save = lambda _, progress: loop.actions.append(f"checkpoint {progress.step}")  # noqa: E731
    record = lambda action: lambda: loop.actions.append(action)  # noqa: E731
    loop.store = cast(
        Any,
        SimpleNamespace(save=save, wait=record("wait"), abandon=record("abandon"), check_writable=lambda: None),
    )
    return loop


def test_evaluation_skipped_by_a_stop_is_done_after_resuming() -> None:
    stopped = scripted(0, 0, stops={3})
    assert not stopped.run(StopRequest())
    assert stopped.actions == ["checkpoint 2", "checkpoint 3", "wait"]
    resumed = scripted(3, 0, stops=set())
    assert resumed.run(StopRequest())
    actions = ["evaluation 3", "checkpoint 4", "evaluation 6", "checkpoint 6", "evaluation 7", "checkpoint 7"]
    assert resumed.actions == [*actions, "wait"]


def test_recorded_evaluation_is_not_repeated() -> None:
    resumed = scripted(3, 3, stops={7})
    assert resumed.run(StopRequest())
    assert resumed.actions == ["checkpoint 4", "evaluation 6", "checkpoint 6", "evaluation 7", "checkpoint 7", "wait"]


@pytest.mark.parametrize("error", [UserError("run", "cannot be written", "make room"), KeyboardInterrupt()])
def test_error_abandons_the_pending_save(error: BaseException) -> None:
    loop = scripted(0, 0, stops=set())
    loop._evaluate = cast(Any, Mock(side_effect=error))  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        loop.run(StopRequest())
    assert loop.actions == ["checkpoint 2", "abandon"]


# --- the schedule ----------------------------------------------------------------------------------------------------


def rates(config: OptimizerConfig, steps: int) -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([{"params": [parameter], "lr": 0.0, "weight_decay": 0.1}])
    scheduler = make_schedule(optimizer, config, steps)
    found = []
    for _ in range(steps):
        scheduler.step(increment=1)
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


def test_cosine_by_hand() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4, schedule="cosine")
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(1, 9)]
    assert rates(config, 12) == pytest.approx([0.25, 0.5, 0.75, 1.0, *cosine])


def test_warm_up_stable_decay_by_hand() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.2, warmup_steps=2, schedule="wsd", decay_steps=4)
    assert rates(config, 10) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_constant_by_hand() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.0, warmup_steps=2, schedule="constant")
    assert rates(config, 5) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0])
