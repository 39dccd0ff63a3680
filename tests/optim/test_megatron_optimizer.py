"""Megatron's AdamW behind our interface: values of schedule, weight decay, clipping and the step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.config.derive import derive
from megatron_ext.config.schema import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from megatron_ext.model.build import build_model
from megatron_ext.model.shape import model_shape
from megatron_ext.optim.megatron import MegatronRunOptimizer
from megatron_ext.platform.device import Platform

CPU = Platform(torch.device("cpu"), "gloo")
STEPS = 20


def _optimizer(groups: Any, **fields: Any) -> MegatronRunOptimizer:
    """Build an optimizer over a tiny fp32 model with matrices and vectors."""
    model = ModelConfig(
        pattern="attention,gated_deltanet,gla", hidden_size=16, num_attention_heads=2, ffn_hidden_size=16
    )
    data, training = DataConfig(path="none", seq_length=8), TrainingConfig(precision="fp32")
    config = derive(RunConfig(data=data, model=model, training=training))
    chunks = build_model(model_shape(config, CPU, 100), CPU, groups, seed=5)
    return MegatronRunOptimizer(chunks, OptimizerConfig(**fields), STEPS, "fp32", groups, CPU)


def _is_decayed(name: str, parameter: Tensor) -> bool:
    """Return False for vectors and for parameters with one vector per unit of a mixer."""
    return parameter.dim() > 1 and not name.endswith("decay_bias")


def _parameters(optimizer: MegatronRunOptimizer) -> dict[str, Any]:
    (chunk,) = optimizer.chunks
    return dict(chunk.module.named_parameters())


def _gradients(step: int, parameters: dict[str, Any], size: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: size * torch.randn(p.shape, generator=generator) for name, p in parameters.items()}


def _step(optimizer: MegatronRunOptimizer, gradients: dict[str, Tensor]) -> float:
    """Update with given gradients, placed where Megatron's hooks accumulate them."""
    optimizer.begin_step()
    for name, parameter in _parameters(optimizer).items():
        parameter.main_grad.copy_(gradients[name])
    for chunk in optimizer.chunks:
        chunk.finish_grad_sync()
    norm = optimizer.compute_grad_norm()
    optimizer.step()
    return norm


def _rates(optimizer: MegatronRunOptimizer) -> Iterator[float]:
    zeros = {name: torch.zeros_like(p) for name, p in _parameters(optimizer).items()}
    for _ in range(STEPS):
        _step(optimizer, zeros)
        yield optimizer.lr


def _cosine(step: int, warmup: int) -> float:
    if step <= warmup:
        return 1e-3 * step / warmup
    along = (step - warmup) / (STEPS - warmup)
    return 1e-4 + (1e-3 - 1e-4) * 0.5 * (1 + math.cos(math.pi * along))


@pytest.mark.parametrize("warmup", [0, 4])
def test_cosine_schedule(one_process: Any, warmup: int) -> None:
    optimizer = _optimizer(one_process, lr=1e-3, min_lr=1e-4, schedule="cosine", warmup_steps=warmup)
    rates = list(_rates(optimizer))
    assert rates == pytest.approx([_cosine(step, warmup) for step in range(1, STEPS + 1)], rel=1e-9)
    assert rates[-1] == pytest.approx(1e-4)


def test_wsd_schedule(one_process: Any) -> None:
    optimizer = _optimizer(one_process, lr=1e-3, min_lr=1e-4, schedule="wsd", warmup_steps=5, decay_steps=6)
    rising = [1e-3 * step / 5 for step in range(1, 6)]
    falling = [1e-3 - (1e-3 - 1e-4) * step / 6 for step in range(1, 7)]
    assert list(_rates(optimizer)) == pytest.approx(rising + [1e-3] * (STEPS - 11) + falling, rel=1e-9)


def test_constant_schedule(one_process: Any) -> None:
    optimizer = _optimizer(one_process, lr=1e-3, min_lr=1e-4, schedule="constant", warmup_steps=2)
    assert list(_rates(optimizer)) == pytest.approx([5e-4] + [1e-3] * (STEPS - 1), rel=1e-9)


@pytest.mark.parametrize("sharding", ["none", "megatron"])
def test_weight_decay_applies_to_matrices_only(one_process: Any, sharding: Any) -> None:
    """With zero gradients only decay changes a parameter, by the factor 1 - lr * decay."""
    optimizer = _optimizer(one_process, lr=1e-2, min_lr=1e-2, weight_decay=0.5, schedule="constant", sharding=sharding)
    before = {name: p.detach().clone() for name, p in _parameters(optimizer).items()}
    _step(optimizer, {name: torch.zeros_like(p) for name, p in before.items()})
    after = _parameters(optimizer)
    kept = {name for name, p in before.items() if torch.equal(after[name], p)}
    assert kept == {name for name, p in before.items() if not _is_decayed(name, p)}
    assert any("norm_weight" in name for name in kept)
    assert any("log_decay" in name for name in kept)
    for name in before.keys() - kept:
        torch.testing.assert_close(after[name].detach(), before[name] * (1 - 1e-2 * 0.5), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("sharding", ["none", "megatron"])
@pytest.mark.parametrize("clip", [0.0, 1.0, 1e6])
def test_steps_equal_torch_adamw(one_process: Any, sharding: Any, clip: float) -> None:
    rate, decay, betas = 1e-2, 0.1, (0.8, 0.95)
    optimizer = _optimizer(
        one_process,
        lr=rate,
        min_lr=rate,
        weight_decay=decay,
        betas=list(betas),
        epsilon=1e-6,
        clip_grad=clip,
        schedule="constant",
        sharding=sharding,
    )
    plain = {name: p.detach().clone().requires_grad_() for name, p in _parameters(optimizer).items()}
    matrices = [p for name, p in plain.items() if _is_decayed(name, p)]
    vectors = [p for name, p in plain.items() if not _is_decayed(name, p)]
    expected = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=rate,
        betas=betas,
        eps=1e-6,
    )
    for step in range(5):
        gradients = _gradients(step, plain)
        norm = _step(optimizer, gradients)
        for name, parameter in plain.items():
            parameter.grad = gradients[name].clone()
        whole = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        assert norm == pytest.approx(whole, rel=1e-6)
        if clip:
            torch.nn.utils.clip_grad_norm_(plain.values(), clip)
        expected.step()
    for name, parameter in _parameters(optimizer).items():
        torch.testing.assert_close(parameter.detach(), plain[name].detach(), rtol=1e-5, atol=1e-6)


def test_gradient_clipping(one_process: Any) -> None:
    """Adam normalizes the first gradient. With a large epsilon the step is lr * g / eps, which shows its size."""
    huge = 1e3
    optimizer = _optimizer(
        one_process, lr=1.0, min_lr=1.0, weight_decay=0.0, epsilon=huge, clip_grad=0.5, schedule="constant"
    )
    before = {name: p.detach().clone() for name, p in _parameters(optimizer).items()}
    gradients = _gradients(1, before, size=100.0)
    norm = _step(optimizer, gradients)
    moved = {name: (before[name].double() - p.detach().double()) * huge for name, p in _parameters(optimizer).items()}
    of_moved = math.sqrt(sum(float(m.square().sum()) for m in moved.values()))
    assert of_moved == pytest.approx(0.5, rel=1e-2)  # fp32 parameters round small changes
    assert norm > 1000


def test_gradients_are_zeroed_between_steps(one_process: Any) -> None:
    optimizer = _optimizer(one_process)
    zeros = {name: torch.zeros_like(p) for name, p in _parameters(optimizer).items()}
    assert _step(optimizer, _gradients(1, zeros)) > 1.0
    assert _step(optimizer, zeros) == 0.0
