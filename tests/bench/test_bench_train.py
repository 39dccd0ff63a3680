"""The command `selectron bench train`: variants train in separate processes or report errors, and tables follow."""

from __future__ import annotations

import gc
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.bench.timing import Ceilings
from megatron_ext.bench.train import rank as train_rank
from megatron_ext.bench.train import run
from megatron_ext.bench.train.measure import Measured, PeakMemory, StepCounts, measure
from megatron_ext.bench.train.rank import FAILED, Job, read_job
from megatron_ext.bench.train.report import TrainingReport, TrainingRow, derived
from megatron_ext.bench.train.run import parse_variant
from megatron_ext.bench.train.step_trace import PARTS, PHASES, Breakdown, Idle
from megatron_ext.cli import main
from megatron_ext.config.load import resolve
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.opening import open_samples
from megatron_ext.data.random_data import make_random_data
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.model.step_parts import MODEL
from megatron_ext.platform.device import Platform
from megatron_ext.utils import gc_control

CPU = Platform(torch.device("cpu"), "gloo")
TINY = """
data: {path: none, seq_length: 16}
model: {pattern: attention, hidden_size: 32, num_attention_heads: 2, ffn_hidden_size: 64}
training: {global_batch_size: 4, micro_batch_size: 1, precision: fp32}
"""


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("a:", ()),
        ("a:model.pattern=attention*24", ("model.pattern=attention*24",)),
        ("a:model.pattern=x*2,y,optimizer.betas=[0.9, 0.95]", ("model.pattern=x*2,y", "optimizer.betas=[0.9, 0.95]")),
        ("a:one/two.yaml,mixers.x.y=1,b.yml", ("one/two.yaml", "mixers.x.y=1", "b.yml")),
    ],
)
def test_parse_variant(text: str, overrides: tuple[str, ...]) -> None:
    assert parse_variant(text) == ("a", overrides)


def test_random_data_vocabulary(tmp_path: Path) -> None:
    make_random_data(tmp_path, 1, 2000, seed=0, vocab_size=7)
    samples, _ = open_samples(tmp_path, 1999, seed=0)
    assert set(samples[0]) == set(range(7))


def test_training_measurements(one_process: Any, small_run: RunConfig, tmp_path: Path) -> None:
    make_random_data(tmp_path, 1, 2000, seed=0, vocab_size=100)
    samples, _ = open_samples(tmp_path, 16, seed=0)
    found = measure(small_run, 100, samples, one_process, CPU, StepCounts(warm_up=1, steps=3, profiled=1))
    assert len(found.seconds) == len(found.losses) == 3
    assert all(seconds > 0 for seconds in (*found.seconds, found.starting, found.building, found.first_step))
    assert found.losses[0] == pytest.approx(math.log(128), abs=0.5)  # of the padded vocabulary
    assert found.tokens == 2 * 16
    # Two tables of 128 x 32, four projections, three feed-forward matrices, three norms.
    assert found.parameters["parameters"] == 2 * 128 * 32 + 4 * 32 * 32 + 3 * 32 * 64 + 3 * 32
    weights = 128 * 32 + 4 * 32 * 32 + 3 * 32 * 64
    assert found.flops_per_token > 6 * weights
    assert found.peak_flops is not None
    assert found.memory.allocated > 2**20
    assert found.memory.reserved is None
    assert found.breakdown is not None
    assert [found.breakdown] == found.breakdown_by_rank
    assert sum(found.breakdown.parts.values()) == pytest.approx(found.breakdown.step)


@pytest.mark.parametrize("recompute", ["none", "mlp", "full"])
def test_plain_megatron_has_same_size_and_flops(
    one_process: Any, small_run: RunConfig, tmp_path: Path, recompute: str
) -> None:
    make_random_data(tmp_path, 1, 2000, seed=0, vocab_size=100)
    samples, _ = open_samples(tmp_path, 16, seed=0)
    config = replace(small_run, training=replace(small_run.training, recompute=recompute))
    step_counts = StepCounts(warm_up=1, steps=2, profiled=0)
    ours, plain = (measure(config, 100, samples, one_process, CPU, step_counts, plain=plain) for plain in (False, True))
    assert plain.parameters == ours.parameters
    assert plain.flops_per_token == pytest.approx(ours.flops_per_token)
    assert plain.losses[0] == pytest.approx(math.log(100), abs=0.2)  # of 128 rows
    assert plain.losses[0] != ours.losses[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("model.pattern=top1_chunk*4", "model.pattern: 'top1_chunk*4' is not supported by plain megatron-core"),
        ("mixers.attention.window=8", "model.pattern: 'attention' is not supported by plain megatron-core"),
        ("model.block=rwkv7", "model.block: 'rwkv7' is not supported by plain megatron-core"),
        ("optimizer.sharding=zero1", "optimizer.sharding: zero1 is not supported by plain megatron-core"),
    ],
)
def test_unsupported_by_plain_megatron(tmp_path: Path, overrides: str, message: str) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    plain, ours = run.read_variants(path, [], ["ours:"], 1, [f"plain:{overrides}"])
    assert plain.plain
    assert str(plain.error).startswith(message)
    assert (ours.plain, ours.error) == (False, None)


def test_no_breakdown_without_profiled_steps(one_process: Any, small_run: RunConfig, tmp_path: Path) -> None:
    make_random_data(tmp_path, 1, 2000, seed=0, vocab_size=100)
    samples, _ = open_samples(tmp_path, 16, seed=0)
    found = measure(small_run, 100, samples, one_process, CPU, StepCounts(warm_up=1, steps=1, profiled=0))
    assert found.breakdown is None
    assert found.breakdown_by_rank == []
    *table, empty, start = replace(REPORT, rows=[ROW.with_measurements(found)]).table()
    assert len(table) == 3
    assert (empty, start[:11]) == ("", "* full took")


PHASES_OF_ONE = {part: dict.fromkeys(PHASES, 0.0) for part in MODEL}
BREAKDOWN = Breakdown(
    step=0.5,
    parts=dict.fromkeys(PARTS, 0.0) | {"mixer": 0.2, "communication": 0.1, "GPU idle": 0.2},
    phases=PHASES_OF_ONE | {"mixer": {"forward": 0.05, "recompute": 0.05, "backward": 0.1}},
    communication=0.15,
    host_syncs={"cudaStreamSynchronize in aten::item (optimizer)": 2.0, "cudaFree in aten::mm (mixer)": 0.5},
    longest_idle=Idle(0.12, "aten::mm in step (mixer)"),
)
MEASURED = Measured(
    parameters={"parameters": 1_000_000, "embedding_parameters": 10, "output_layer_parameters": 10},
    tokens=4000,
    seconds=[0.5, 0.4, 0.8],
    losses=[3.0, 2.5, 2.25],
    flops_per_token=1e9,
    peak_flops=8e13,
    memory=PeakMemory(allocated=3 << 30, reserved=4 << 30, allocated_before=5 << 30),
    breakdown=BREAKDOWN,
    breakdown_by_rank=[replace(BREAKDOWN, longest_idle=Idle(0.01, "aten::add in step (other)")), BREAKDOWN],
    starting=20.0,
    building=12.5,
    first_step=30.25,
)
ROW = TrainingRow(name="full", overrides=("a.b=1",), config={"model": {}}, processes=2, wall_seconds=70.0)
REPORT = TrainingReport(
    name="small",
    overrides=("c.d=2",),
    processes=2,
    machine={"torch": "2"},
    ceilings=Ceilings(7e14, 4e12),
    step_counts=StepCounts(warm_up=5, steps=3, profiled=2),
    prepared=False,
    rows=[],
)


def test_rates_by_hand() -> None:
    assert derived(MEASURED, 2) == pytest.approx(
        {
            "s_per_step": 0.5,
            "tokens_per_s": 8000,
            "tokens_per_s_min": 5000,
            "tokens_per_s_max": 10000,
            "tokens_per_s_per_process": 4000,
            "mfu": 0.1,
            "model_tflops_per_process": 4.0,
        }
    )


def test_the_tables_by_hand(tmp_path: Path) -> None:
    big = replace(ROW, name="big").with_failure("OutOfMemoryError: x")
    report = replace(REPORT, rows=[ROW.with_measurements(MEASURED), big])
    report.write(tmp_path)
    text = (tmp_path / "train.md").read_text()
    assert text == report.markdown()
    assert "`small c.d=2`, 2 processes. Medians of 3 steps after 5, on random tokens" in text
    assert "bf16 product of 8192 x 8192 matrices 700 TFLOP/s, copy 4.00 TB/s" in text
    row = "| full | 8,000 | 5,000 to 10,000 | 4,000 | 500 | 10.0 % | 3.00 | 4.00 | 1,000,000 | 2.2500 | 2.5 | 1.00x |"
    assert row in text
    assert "| big | failed: OutOfMemoryError: x |  |" in text
    assert "| full | 500 | 200 (40 %) | 0.0 (0 %) |" in text
    assert "| full | recompute | 50.0 | 0.0 |" in text
    start = "* full took 70.0 s, of which 20.0 s to start the processes, 12.5 s to build model and optimizer"
    assert start in text
    assert "* full: communication 150 ms, 50.0 ms of it overlapped" in text
    assert "* full: longest idle interval 120 ms, on rank 1, while the host was in aten::mm in step (mixer)" in text
    assert "* full: 2 x cudaStreamSynchronize in aten::item (optimizer)" in text
    raw = json.loads((tmp_path / "train.json").read_text())
    assert raw["rows"][0]["measured"]["breakdown"]["parts"]["mixer"] == 0.2
    assert raw["rows"][0]["configuration"] == {"model": {}}
    assert [row["speed_over_first"] for row in raw["rows"]] == [1, None]
    assert raw["rows"][1]["failed"] == "OutOfMemoryError: x"
    assert raw["ceilings"] == {"tflops": 700, "gb_per_s": 4000}


def test_nonfinite_loss_is_failure() -> None:
    row = ROW.with_measurements(replace(MEASURED, losses=[3.0, math.nan, 1.0]))
    assert row.failed == "the loss of timed step 2 is nan"
    assert row.to_dict()["measured"]["losses"] == [3.0, "nan", 1.0]


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs, or none")
def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two processes run two variants. One is rejected, the other still runs."""
    config, output = tmp_path / "tiny.yaml", tmp_path / "out"
    config.write_text(TINY)
    options = ["--processes", "2", "--steps", "1", "--warmup", "1", "--profile", "1", "--vocabulary", "100"]
    for variant in ("bad:model.num_attention_heads=5", "tp:parallel.tensor=2,training.seed=7"):
        options += ["--variant", variant]
    assert main(["bench", "train", *options, "--output", str(output), str(config)]) == 1
    raw = json.loads((output / "train.json").read_text())
    bad, tp = raw["rows"]
    assert "is not divisible by 5 heads" in bad["failed"]
    assert tp["configuration"]["training"]["seed"] == 7
    assert "failed" not in tp
    measured = tp["measured"]
    assert measured["starting"] + measured["building"] + measured["first_step"] < tp["took"]
    assert measured["tokens"] == 4 * 16
    assert len(measured["breakdown_by_rank"]) == 2
    assert measured["breakdown"]["parts"]["communication"] > 0
    for one in measured["breakdown_by_rank"]:
        assert sum(one["parts"].values()) == pytest.approx(one["step"])
    assert raw["machine"]["megatron-core"]
    assert (output / "train.md").read_text() in capfd.readouterr().out


def test_imports_of_rank_are_frozen_for_gc(monkeypatch: pytest.MonkeyPatch) -> None:
    collecting: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: collecting.append(gc.isenabled()))
    monkeypatch.setattr(gc_control, "_owns_process", False)  # restored after this test
    monkeypatch.setattr(train_rank, "run_rank", lambda folder, *, only_machine: 0)
    monkeypatch.setattr(sys, "argv", ["selectron", "bench", "train-rank", "folder"])
    assert main() == 0
    assert collecting == [False]


def test_failed_variants_do_not_stop_benchmark(
    tmp_path: Path, small_run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake processes: one reports its error, one is killed, and the interruption of one ends the benchmark."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ends = iter([("OutOfMemoryError: CUDA out of memory.", 1), (None, 137), (None, 130)])
    jobs: list[Job] = []

    def launch(command: list[str], processes: int) -> int:
        folder = Path(command[-1])
        jobs.append(read_job(folder))
        message, code = next(ends)
        if message is not None:
            (folder / FAILED).write_text(message)
        return code

    monkeypatch.setattr(run, "launch", launch)
    variants = [run.Variant(name=name, overrides=(), config=resolve(small_run, load_all())) for name in "abcd"]
    step_counts = StepCounts(warm_up=1, steps=2, profiled=0)
    plan = run.TrainingPlan(processes=1, step_counts=step_counts, vocabulary=50, prepared=False)
    saved: list[int] = []
    identity = {"name": "small", "overrides": (), "processes": 1}
    lines: list[str] = []
    report, code = run.bench(
        variants, plan, identity, report_progress=lines.append, save=lambda report: saved.append(len(report.rows))
    )
    assert code == 130
    assert [row.failed for row in report.rows] == [
        "OutOfMemoryError: CUDA out of memory.",
        "terminated by SIGKILL (possibly out of memory)",
        "terminated by SIGINT",
    ]
    assert saved == [0, 1, 2, 3]
    assert lines[1] == "a: failed: OutOfMemoryError: CUDA out of memory."
    assert [job.config for job in jobs] == [variant.config for variant in variants[:3]]
    assert jobs[0].step_counts == step_counts
    assert jobs[0].vocabulary == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps: 0 is less than 1"),
        (["--profile", "-1"], "--profile: -1 is less than 0"),
        (["--processes", "0"], "--processes: 0 is less than 1"),
        (["--variant", "model.pattern=attention"], "--variant: 'model.pattern=attention' is not a variant"),
        (["--variant", "a:", "--variant", "a:"], "--variant: 'a' is given twice"),
        (["--processes", "3"], "is not divisible"),
    ],
)
def test_invalid_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", *options, "examples/110m_2k.yaml", "data.path=none"]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def test_options_between_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["examples/110m_2k.yaml", "training.steps=2", "--processes", "1", "model.depth=3", "--steps", "1"]
    assert main(["bench", "train", *arguments]) == 2
    assert capsys.readouterr().err.startswith("selectron: error: model.depth: no such field")


def test_launcher_is_rejected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(["bench", "train", "examples/110m_2k.yaml"]) == 2
    assert "RANK: is set by a launcher" in capsys.readouterr().err
