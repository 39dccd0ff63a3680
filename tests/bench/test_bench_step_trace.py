"""Breakdown of a step's time: from a handwritten GPU trace, and from steps with a known slow part."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.bench.steps import TimedRun
from megatron_ext.bench.train.measure import profile_steps
from megatron_ext.bench.train.profiler_ranges import record_parts
from megatron_ext.bench.train.step_trace import (
    OTHER,
    PARTS,
    PHASES,
    PREFIX,
    RECOMPUTE,
    Breakdown,
    Idle,
    break_down,
    mean_breakdown,
)
from megatron_ext.config.schema import RunConfig
from megatron_ext.model.step_parts import BACKWARD, FEED_FORWARD, FORWARD, MIXER, MODEL
from megatron_ext.platform.device import Platform

CPU = Platform(torch.device("cpu"), "gloo")
MAIN, AUTOGRAD, STREAM, NCCL_STREAM = 100, 101, 7, 20


def host(cat: str, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def section(name: str, ts: float, dur: float, tid: int = MAIN) -> dict[str, Any]:
    return host("user_annotation", PREFIX + name, ts, dur, tid)


def launch(ts: float, correlation: int, tid: int = MAIN, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    cat = "cuda_driver" if name.startswith("cu") and not name.startswith("cuda") else "cuda_runtime"
    return host(cat, name, ts, 1, tid, correlation=correlation)


def kernel(name: str, ts: float, dur: float, correlation: int, stream: int = STREAM, **args: Any) -> dict[str, Any]:
    cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    return {**host(cat, name, ts, dur, stream, correlation=correlation, **args), "pid": 0}


def flow(number: int, forward: float, backward: float, tid: int = AUTOGRAD) -> list[dict[str, Any]]:
    common = {"cat": "fwdbwd", "name": "fwdbwd", "pid": 1, "id": number}
    return [{**common, "ph": "s", "tid": MAIN, "ts": forward}, {**common, "ph": "f", "tid": tid, "ts": backward}]


GPU_STEP = [
    section("step", 0, 1000),
    section("data", 0, 50),
    # The input's copy is in no range. The mixer's product is a Triton kernel outside of operators, with a wait.
    host("cpu_op", "aten::copy_", 55, 5),
    launch(56, 1, name="cudaMemcpyAsync"),
    launch(58, 2, name="cudaStreamSynchronize"),
    kernel("Memcpy HtoD (Pageable -> Device)", 60, 10, 1),
    section("norms and residual", 100, 200),
    section("mixer", 110, 90),
    host("cpu_op", "aten::mm", 120, 10, **{"External id": 5}),
    launch(121, 3),
    kernel("gemm", 150, 100, 3),
    launch(140, 4, name="cuLaunchKernelEx"),
    kernel("_triton_forward", 250, 50, 4),
    host("cpu_op", "aten::item", 150, 10),
    launch(151, 5, name="cudaStreamSynchronize"),
    {**launch(151.2, 5, name="cuStreamSynchronize"), "dur": 0.5},
    # A norm's kernel, in the range around the mixer's.
    launch(210, 6),
    kernel("rms_norm", 300, 20, 6),
    # A collective, partly concurrent with the norm's kernel.
    host("user_annotation", "nccl:all_reduce", 220, 5),
    launch(221, 7),
    kernel("ncclDevKernel_AllReduce_Sum_f32", 310, 60, 7, NCCL_STREAM),
    # Backward pass in autograd's thread: the mixer's product and the accumulation of its weight's gradient.
    host("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 400, 30, AUTOGRAD),
    host("cpu_op", "MmBackward0", 401, 20, AUTOGRAD),
    launch(405, 8, AUTOGRAD),
    kernel("gemm", 410, 200, 8),
    *flow(1, 120, 401),
    host("cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 440, 20, AUTOGRAD),
    launch(445, 9, AUTOGRAD),
    kernel("add", 610, 40, 9),
    # A kernel without a launch in the trace is assigned by its operator.
    kernel("gemm", 650, 10, 99, **{"External id": 5}),
    section("optimizer", 700, 50),
    launch(710, 10),
    kernel("adam", 750, 150, 10),
    section("end of the step", 800, 200),
    launch(801, 11, name="cudaDeviceSynchronize"),
]


def test_kernel_time_is_attributed_to_launching_part() -> None:
    (found,) = break_down(GPU_STEP)
    expected = {
        "data": 50 + 10,  # idle GPU time and the copy
        "mixer": 100 + 50 + 200 + 40 + 10,
        "norms and residual": 20,
        "communication": 50,  # of 60, 10 overlap with the norm's kernel
        "optimizer": 150,
    }
    expected["GPU idle"] = 1000 - sum(expected.values())
    assert {part: 1e6 * s for part, s in found.parts.items() if s} == pytest.approx(expected)
    assert 1e6 * found.step == pytest.approx(1000)
    assert found.communication == pytest.approx(60e-6)
    phases = {phase: 1e6 * seconds for phase, seconds in found.phases[MIXER].items()}
    assert phases == pytest.approx({FORWARD: 160, RECOMPUTE: 0, BACKWARD: 240})


def test_peer_copies_and_barriers_are_communication() -> None:
    meeting = "void c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)"
    step = [section("step", 0, 100), kernel(meeting, 10, 5, 1), kernel("Memcpy PtoP (Device -> Device)", 15, 30, 2)]
    (found,) = break_down(step)
    assert found.communication == found.parts["communication"] == pytest.approx(35e-6)


def test_host_syncs_have_locations() -> None:
    (found,) = break_down(GPU_STEP)
    assert found.host_syncs == {
        "cudaStreamSynchronize in aten::copy_ (other)": 1,
        "cudaStreamSynchronize in aten::item (mixer)": 1,
    }


def test_longest_idle_interval() -> None:
    beside = host("cpu_op", "aten::mm", 30, 40, AUTOGRAD)
    step = [section("step", 0, 200), kernel("gemm", 0, 20, 1), beside, kernel("gemm", 90, 60, 2)]
    first, second = break_down([*step, section("step", 200, 100), host("cpu_op", "aten::copy_", 220, 80)])
    assert first.longest_idle == Idle(pytest.approx(70e-6), "aten::mm (other)")  # the main thread only waits
    assert second.longest_idle == Idle(pytest.approx(100e-6), "aten::copy_ in step (other)")
    assert mean_breakdown([first, second]).longest_idle == second.longest_idle
    busy = mean_breakdown(break_down([section("step", 0, 100), kernel("gemm", 0, 100, 1)]))
    assert busy.longest_idle is None


def test_kernels_are_cut_at_step_ends() -> None:
    later = [section("step", 1000, 100), kernel("late", 890, 150, 0)]
    first, second = break_down([*GPU_STEP, *later])
    assert 1e6 * first.parts[OTHER] == pytest.approx(100)
    assert 1e6 * second.parts[OTHER] == pytest.approx(40)
    for one in (first, second):
        assert sum(one.parts.values()) == pytest.approx(one.step)
    both = mean_breakdown([first, second])
    assert both.step == pytest.approx((first.step + second.step) / 2)
    assert both.host_syncs is not None
    assert both.host_syncs["cudaStreamSynchronize in aten::item (mixer)"] == 0.5


class Slow(torch.autograd.Function):
    """Identity whose forward and backward pass take a known time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(0.4)
        return gradient


def profiled(config: RunConfig, groups: Any, slow: str, monkeypatch: pytest.MonkeyPatch) -> Breakdown:
    """Return the breakdown of a step of a one-layer model, one part of which is slow."""
    run = TimedRun(config, 100, groups, CPU)
    (layer,) = run.trainer.optimizer.chunks[0].module.decoder.layers
    module = getattr(layer, slow)
    forward = module.forward

    def slow_forward(*args: Any, **more: Any) -> Any:
        out, bias = forward(*args, **more)
        return Slow.apply(out), bias

    monkeypatch.setattr(module, "forward", slow_forward)
    (found,) = profile_steps(run, CPU, 1)
    assert module.forward is slow_forward  # the wrapper that names parts was removed
    assert "step" not in vars(run.trainer.optimizer)
    return found


@pytest.mark.parametrize(
    ("slow", "part", "recompute"),
    [("self_attention", MIXER, "none"), ("mlp", FEED_FORWARD, "full")],
)
def test_slow_part_is_attributed(
    slow: str, part: str, recompute: Any, one_process: Any, small_run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = replace(small_run.training, global_batch_size=1, recompute=recompute)
    found = profiled(replace(small_run, training=training), one_process, slow, monkeypatch)
    slept = {FORWARD: 0.2, RECOMPUTE: 0.2 if recompute == "full" else 0.0, BACKWARD: 0.4}
    for phase in PHASES:
        others = sum(found.phases[other][phase] for other in MODEL if other != part)
        assert slept[phase] <= found.phases[part][phase], phase
        assert others <= found.step - sum(slept.values()), phase
    assert sum(found.parts.values()) == pytest.approx(found.step)
    assert all(found.parts[one] > 0 for one in PARTS if one not in (OTHER, "GPU idle", "communication"))
    assert found.parts["GPU idle"] == 0
    assert found.host_syncs is None


def test_record_parts_restores_model(one_process: Any, small_run: RunConfig) -> None:
    run = TimedRun(small_run, 100, one_process, CPU)
    modules = [module for chunk in run.trainer.optimizer.chunks for module in chunk.modules()]
    with record_parts(run.trainer):
        named = [module for module in modules if "forward" in vars(module)]
    # The model, its embedding, the transformer block, its layer, and the layer's mixer and feed-forward.
    assert len(named) == 6
    assert not any("forward" in vars(module) for module in modules)
