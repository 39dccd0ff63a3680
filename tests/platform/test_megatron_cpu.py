"""CPU adapter by itself. distributed/test_cuda_calls.py checks that no call bypasses it in a real run."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import whole_run
from launching import write_config
from pool import WorkerPool

from megatron_ext.platform import megatron_cpu
from megatron_ext.platform.adamw import AdamW


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    if torch.cuda.is_available():
        pytest.skip("about the CPU")
    megatron_cpu.install()
    return megatron_cpu


def test_installing_does_not_change_torch() -> None:
    """In a separate process: only megatron.core's reference to torch may change, not torch itself."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", _INSTALL_AND_COMPARE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["unaltered", "rebound", "later", "uncompiled", "once"]


_INSTALL_AND_COMPARE = """
import sys, torch
import megatron.core.activations, megatron.core.utils
from megatron_ext.platform import megatron_cpu
compiled = megatron.core.activations.squared_relu
owners = [torch, torch.cuda, torch.Tensor, torch.nn.Module, torch.random]
before = [dict(vars(owner)) for owner in owners]
assert not megatron_cpu.is_installed()
megatron_cpu.install()
assert megatron_cpu.is_installed()
for owner, names in zip(owners, before):
    assert all(vars(owner)[name] is value for name, value in names.items()), owner
print("unaltered")
assert megatron.core.utils.torch is not torch and megatron.core.utils.torch.cuda.current_device() == torch.device("cpu")
print("rebound")
assert "megatron.core.models.T5.t5_model" not in sys.modules
import megatron.core.models.T5.t5_model as later
assert later.torch is megatron.core.utils.torch
from megatron.core.fusions.fused_bias_gelu import bias_gelu
assert not hasattr(bias_gelu, "_torchdynamo_orig_callable")
print("later")
assert megatron.core.activations.squared_relu is compiled._torchdynamo_orig_callable
print("uncompiled")
finders = len(sys.meta_path)
megatron_cpu.install()
assert len(sys.meta_path) == finders and later.torch is megatron.core.utils.torch
print("once")
"""


def test_modules_imported_later_see_the_proxy_and_others_do_not(
    adapter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import megatron.core

    (tmp_path / "new_here.py").write_text("import torch")
    monkeypatch.setattr(megatron.core, "__path__", [*megatron.core.__path__, str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)
    inside, outside = import_module("megatron.core.new_here"), import_module("new_here")
    for module in (inside, outside):
        monkeypatch.delitem(sys.modules, module.__name__)
    assert inside.torch is adapter._proxy
    assert outside.torch is torch


@pytest.mark.parametrize("device", ["cuda", "cuda:3", 0, torch.device("cuda"), torch.device("cuda", 1), "cpu"])
def test_factories_map_cuda_devices_to_the_cpu(adapter: Any, device: Any) -> None:
    proxy = adapter._proxy
    for made in (
        proxy.empty(2, device=device),
        proxy.zeros(2, 3, device=device, dtype=torch.bfloat16),
        proxy.tensor([1, 2], device=device),
        proxy.ones_like(torch.zeros(3), device=device),
        proxy.arange(4, device=device),
        proxy.randn(3, device=device),
    ):
        assert made.device == torch.device("cpu")
    assert proxy.zeros(2, 3, device=device, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert proxy.empty(2, device="meta").device.type == "meta"
    assert torch.equal(proxy.tensor([1, 2]), torch.tensor([1, 2]))


def test_proxy_forwards_other_attributes(adapter: Any) -> None:
    proxy = adapter._proxy
    assert proxy.nn is torch.nn
    assert proxy.float32 is torch.float32
    assert proxy.distributed is torch.distributed
    assert proxy.cuda.is_available is torch.cuda.is_available
    with pytest.raises(AttributeError):
        _ = proxy.no_such_thing


def test_cuda_functions_on_the_cpu(adapter: Any) -> None:
    cuda = adapter._proxy.cuda
    assert cuda.current_device() == torch.device("cpu")
    assert cuda.device_count() == 1
    cuda.set_device(0)
    cuda.synchronize()
    with cuda.stream(cuda.Stream()):
        cuda.current_stream().wait_stream(cuda.default_stream())
    event = cuda.Event(enable_timing=True)
    event.synchronize()
    torch.manual_seed(3)
    state = cuda.get_rng_state()
    drawn = torch.rand(3)
    cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)


def test_tensor_types_are_cuda_types_inside_the_context(adapter: Any) -> None:
    x = torch.zeros(2)
    methods = torch.Tensor.type, torch.Tensor.cuda
    with adapter.tensor_types_as_cuda():
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert x.type(torch.float64).dtype == torch.float64  # still a conversion
        assert x.cuda() is x
    assert x.type() == "torch.FloatTensor"
    assert (torch.Tensor.type, torch.Tensor.cuda) == methods


def test_tensor_types_are_restored_after_an_error(adapter: Any) -> None:
    methods = torch.Tensor.type, torch.Tensor.cuda
    with pytest.raises(KeyError), adapter.tensor_types_as_cuda():
        raise KeyError
    assert (torch.Tensor.type, torch.Tensor.cuda) == methods


def test_types_are_unchanged_without_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_cpu, "_proxy", None)
    with megatron_cpu.tensor_types_as_cuda():
        assert torch.zeros(1).type() == "torch.FloatTensor"


def test_rng_tracker_forks_and_restores_the_cpu_generator(adapter: Any) -> None:
    from megatron.core.tensor_parallel import random

    tracker = random.CudaRNGStatesTracker()
    tracker.add("one", 11)
    tracker.add("two", 22)
    torch.manual_seed(5)
    outside = torch.rand(2)
    torch.manual_seed(5)
    draws = []
    for name in ("one", "two", "one"):
        with tracker.fork(name):
            draws.append(torch.rand(2))
    assert torch.equal(torch.rand(2), outside)  # the outer generator is unaffected
    generator = torch.Generator().manual_seed(11)
    assert torch.equal(torch.cat([draws[0], draws[2]]), torch.cat([torch.rand(2, generator=generator) for _ in "12"]))
    assert not torch.equal(draws[0], draws[1])


def test_gradient_norm_is_accurate(adapter: Any) -> None:
    from megatron.core.optimizer.clip_grads import l2_norm_impl

    gradients = [torch.full((1_000_003,), 0.1), torch.ones(1)]
    norm, per_tensor = l2_norm_impl(65536, None, [gradients], False)
    exact = (1_000_003 * float(torch.tensor(0.1)) ** 2 + 1.0) ** 0.5
    assert float(norm) == pytest.approx(exact, rel=1e-7)
    assert per_tensor is None


def trained_modules(rank: int, world_size: int, *run: Any) -> list[str]:
    """Train, and return the names of all imported modules."""
    whole_run.run(rank, world_size, *run)
    return list(sys.modules)


def test_training_does_not_import_the_compiler(data: Path, tmp_path: Path) -> None:
    """Importing it would take longer than building the model. In a new process, because other tests compile."""
    config = write_config(tmp_path, data, tmp_path / "runs")
    new = WorkerPool(1)
    try:
        (modules,) = new.run(trained_modules, 1, config, ["training.steps=3", "model.pattern=attention"])
    finally:
        new.stop()
    assert "torch._dynamo" not in modules
    assert "megatron.core.optimizer" in modules


def test_adamw_equals_that_of_torch() -> None:
    start = torch.randn(5, generator=torch.Generator().manual_seed(1))
    results = []
    for kind in (torch.optim.AdamW, AdamW):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = kind([{"params": [parameter], "weight_decay": 0.1}], lr=0.1, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            parameter.square().sum().backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        results.append(parameter.detach())
    assert torch.equal(*results)
    assert not torch.equal(results[0], start)
