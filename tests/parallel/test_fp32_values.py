"""Parameters that the forward pass of a bf16 run uses in fp32: initial values, use in mixers, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ext.config.derive import derive
from megatron_ext.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig
from megatron_ext.mixers.core.base import MixInput
from megatron_ext.model.build import build_model
from megatron_ext.model.shape import model_shape
from megatron_ext.parallel.fp32_values import fp32_values, in_fp32, keep_fp32_values, set_values
from megatron_ext.platform.device import Platform

CPU = Platform(torch.device("cpu"), "gloo")
OF_MIXERS = {
    "mamba": {"A_log", "D", "dt_bias"},
    "mamba2": {"log_decay", "step_bias", "skip"},
    "gated_deltanet": {"log_decay", "step_bias"},
    "gla": {"decay_bias"},
    "rwkv6": {"decay_base"},
    "rwkv7": {"decay_base"},
    "retnet": set(),
    "deltanet": set(),
    "attention": set(),
}


def _mixer(name: str, groups: Any, precision: str) -> Any:
    model = ModelConfig(pattern=name, hidden_size=32, num_attention_heads=4)
    run = RunConfig(
        data=DataConfig(path="none", seq_length=16), model=model, training=TrainingConfig(precision=precision)
    )  # type: ignore[arg-type]
    (chunk,) = build_model(model_shape(derive(run), CPU, 100), CPU, groups, seed=3)
    return getattr(chunk, "module", chunk).decoder.layers[0].self_attention


@pytest.mark.parametrize("name", OF_MIXERS)
def test_decays_are_initialized_in_fp32(name: str, one_process: Any) -> None:
    mixer, exact = (_mixer(name, one_process, precision) for precision in ("bf16", "fp32"))
    own = dict(mixer.named_parameters())
    assert {key for key, parameter in own.items() if fp32_values(parameter) is not None} == OF_MIXERS[name]
    assert all(fp32_values(parameter) is None for parameter in exact.parameters())
    part = MixInput(first_head_group=0, num_head_groups=mixer.num_head_groups())
    for key in OF_MIXERS[name]:
        assert own[key].dtype == torch.bfloat16
        expected = getattr(exact, key).detach()
        taken = mixer.own_head_groups(own[key], part)
        assert torch.equal(taken, expected)
        assert torch.equal(own[key], expected.bfloat16())


def test_small_change_of_decay_affects_output(one_process: Any) -> None:
    mixer = _mixer("mamba2", one_process, "bf16")
    x = torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(1)).bfloat16() * 8
    with torch.no_grad():
        before = mixer(x)[0].clone()
        fp32_values(mixer.step_bias).add_(2.0**-10)  # type: ignore[union-attr]
        assert not torch.equal(mixer(x)[0], before)


def test_gradient_goes_to_parameter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    keep_fp32_values(parameter)
    values = torch.tensor([1.001, 2.003, -3.007, 0.1])
    set_values(parameter, values)
    taken = in_fp32(parameter)
    assert torch.equal(taken, values)
    (taken.square().sum()).backward()
    assert torch.equal(parameter.grad, (2 * values).bfloat16())
    fp32_values(parameter).zero_()  # type: ignore[union-attr]
    assert torch.equal(taken, values)  # values saved for the backward pass do not change


def test_fp32_parameter_needs_no_copy() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    keep_fp32_values(parameter)
    assert fp32_values(parameter) is None
    assert in_fp32(parameter) is parameter
