from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.config.schema import ParallelConfig
from megatron_ext.platform import device as platform
from megatron_ext.platform import megatron_cpu
from megatron_ext.platform.device import Platform, choose_backend, local_rank, platform_for_run, select_platform
from megatron_ext.utils.errors import UserError

CPU = Platform(torch.device("cpu"), "gloo")
GPU = Platform(torch.device("cuda", 0), "nccl")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that simulates a machine with a number of GPUs and records the selected device."""
    chosen: list[int] = []

    def make(gpus: int) -> list[int]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr(megatron_cpu, "install", lambda: chosen.append(-1))
        return chosen

    return make


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_cpu_with_gloo_and_adapter_without_a_gpu(machine: Any, device: Any) -> None:
    calls = machine(0)
    assert select_platform(device) == CPU
    assert calls == [-1]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_local_process_uses_its_own_gpu(machine: Any, device: Any) -> None:
    calls = machine(2)
    assert select_platform(device, 1) == Platform(torch.device("cuda", 1), "nccl")
    assert calls == [1]


@pytest.mark.parametrize(
    ("parallel", "before", "after"),
    [
        ({"context": 4, "context_transport": "copy_engine"}, None, None),  # CUDA's default
        ({"context": 4, "context_transport": "nccl"}, None, "1"),
        ({"context": 2, "tensor": 2, "context_transport": "copy_engine"}, None, "1"),
        ({"context": 4, "context_transport": "nccl"}, "32", "32"),
    ],
)
def test_streams_share_a_queue_except_with_copy_engines(
    machine: Any, monkeypatch: pytest.MonkeyPatch, parallel: Any, before: str | None, after: str | None
) -> None:
    machine(4)
    environment = {"LOCAL_RANK": "3"} | ({"CUDA_DEVICE_MAX_CONNECTIONS": before} if before else {})
    monkeypatch.setattr(platform.os, "environ", environment)
    assert platform_for_run("auto", ParallelConfig(**parallel)) == Platform(torch.device("cuda", 3), "nccl")
    assert environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == after


def test_cpu_on_a_machine_with_gpus_is_refused(machine: Any) -> None:
    machine(1)
    with pytest.raises(UserError) as caught:
        select_platform("cpu")
    assert str(caught.value) == (
        "run.device: 'cpu' on a machine with CUDA: megatron-core puts its tensors on the GPU it sees; "
        "hide the GPUs with CUDA_VISIBLE_DEVICES= or use run.device=auto"
    )


@pytest.mark.parametrize(("gpus", "rank"), [(0, 0), (2, 2)])
def test_more_processes_than_gpus_are_refused(machine: Any, gpus: int, rank: int) -> None:
    calls = machine(gpus)
    with pytest.raises(UserError) as caught:
        select_platform("cuda", rank)
    assert str(caught.value) == (
        f"run.device: 'cuda' for local process {rank}, but this machine has {gpus} GPU(s); "
        "start at most one process a GPU, or use run.device=cpu"
    )
    assert calls == []


@pytest.mark.parametrize(
    ("asked", "installed", "where", "chosen"),
    [
        ("auto", True, GPU, "transformer_engine"),
        ("auto", False, GPU, "local"),
        ("auto", True, CPU, "local"),
        ("local", True, GPU, "local"),
        ("local", False, CPU, "local"),
        ("transformer_engine", True, GPU, "transformer_engine"),
    ],
)
def test_backend_choice(
    monkeypatch: pytest.MonkeyPatch, asked: Any, installed: bool, where: Platform, chosen: str
) -> None:
    _transformer_engine(monkeypatch, installed)
    assert choose_backend(asked, where) == chosen


@pytest.mark.parametrize(
    ("installed", "where", "reason"), [(False, GPU, "is not installed"), (True, CPU, "needs a GPU")]
)
def test_unavailable_transformer_engine_is_rejected(
    monkeypatch: pytest.MonkeyPatch, installed: bool, where: Platform, reason: str
) -> None:
    _transformer_engine(monkeypatch, installed)
    with pytest.raises(UserError) as caught:
        choose_backend("transformer_engine", where)
    assert str(caught.value) == (
        f"run.backend: 'transformer_engine' {reason}; "
        "install the extra `selectron[gpu]` on a GPU machine, or use run.backend=local"
    )


def _transformer_engine(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    spec = ModuleSpec("transformer_engine", None) if installed else None
    monkeypatch.setattr(platform, "find_spec", lambda _: spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_flops_of_the_cpu_are_measured(dtype: torch.dtype) -> None:
    peak = CPU.peak_flops(dtype)
    assert peak is not None
    assert 1e8 < peak < 1e15


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA B200", 2250e12), ("Some other GPU", None)],
)
def test_peak_flops_of_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert GPU.peak_flops(torch.bfloat16) == peak


def test_peak_memory_is_that_of_the_process_in_bytes() -> None:
    before = CPU.peak_memory_bytes()
    block = torch.ones(64 * 2**20)  # 256 MiB, all pages touched
    assert CPU.peak_memory_bytes() >= max(before, block.nbytes)
    assert before > 2**20


def test_synchronize_waits_for_the_own_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    CPU.synchronize()
    GPU.synchronize()
    assert waited == [GPU.device]


def test_local_rank_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert local_rank() == 0
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_rank() == 3


def test_existing_process_group_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[SimpleNamespace] = []
    monkeypatch.setattr(platform.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(platform.dist, "init_process_group", lambda *a, **k: started.append(SimpleNamespace(a=a, k=k)))
    platform.start_process_group(CPU)
    assert started == []
    monkeypatch.setattr(platform.dist, "is_initialized", lambda: False)
    platform.start_process_group(GPU)
    assert started[0].a == ("nccl",)
    assert started[0].k["device_id"] == GPU.device


@pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron has functions compiled there")
def test_rank_does_not_import_unneeded_modules() -> None:
    """torch's compiler, statistics and plotting libraries would take half of the import time."""
    needless = ("torch._inductor", "scipy.stats", "matplotlib")
    code = (
        "import sys; from megatron_ext.commands import run_config; run_config.mixers(); "
        "import megatron_ext.training.run; "
        f"print([name for name in {needless} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
