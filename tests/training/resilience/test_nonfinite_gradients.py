"""The first gradient that is not finite, in the order of the backward pass, by its name in the whole model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_ext.training.resilience.nonfinite_gradients import checked_gradients, named_parameters_in_model


class Layer(torch.nn.Module):
    """Layer of a pipeline stage, numbered from 1 in the whole model."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Chunk(torch.nn.Module):
    """Two layers between two matrices, within two wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Module()
        self.module.module = torch.nn.ModuleDict(
            {
                "first": torch.nn.Linear(3, 3),
                "layers": torch.nn.ModuleList([Layer(11), Layer(12)]),
                "last": torch.nn.Linear(3, 1),
            }
        )

    def forward(self, x: Tensor, broken_before: str | None = None, value: float = math.nan) -> Tensor:
        parts = self.module.module
        for name, part in {"first": parts["first"], "10": parts["layers"][0], "11": parts["layers"][1]}.items():
            if name == broken_before:  # corrupt the gradient from here on
                x.register_hook(lambda gradient: gradient * value)
            x = part(x)
        return parts["last"](x).sum()


INPUT = torch.arange(6.0).view(2, 3)


def test_parameter_names_are_those_of_the_whole_model() -> None:
    assert [name for name, _ in named_parameters_in_model(Chunk())] == [
        "first.weight",
        "first.bias",
        "layers.10.linear.weight",
        "layers.10.linear.bias",
        "layers.11.linear.weight",
        "layers.11.linear.bias",
        "last.weight",
        "last.bias",
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("broken_before", "first"), [("11", "layers.10.linear."), ("10", "first.")])
def test_first_nonfinite_gradient_is_found(broken_before: str, first: str, value: float) -> None:
    """All gradients after the fault are non-finite, so only the first one identifies it."""
    torch.manual_seed(1)
    chunk = Chunk()
    with checked_gradients([chunk]) as first_unsound:
        chunk(INPUT.clone().requires_grad_(), broken_before, value).backward()
    found = first_unsound()
    assert found is not None
    assert found.startswith(first)
    assert not chunk.module.module["first"].weight.grad.isfinite().all()


def test_finite_gradients_and_removal_of_the_hooks() -> None:
    torch.manual_seed(1)
    chunk = Chunk()
    chunk.module.module["last"].weight.requires_grad_(False)
    with checked_gradients([chunk]) as first_unsound:
        chunk(INPUT).backward()
    assert first_unsound() is None
    chunk(INPUT.clone().requires_grad_(), "10").backward()
    assert first_unsound() is None, "nobody looks any more"
    assert not any(parameter._backward_hooks for parameter in chunk.parameters())


def test_any_micro_batch_counts() -> None:
    torch.manual_seed(1)
    chunk = Chunk()
    with checked_gradients([chunk]) as first_unsound:
        chunk(INPUT).backward()
        chunk(INPUT.clone().requires_grad_(), "11").backward()
        chunk(INPUT).backward()
    assert (first_unsound() or "").startswith("layers.10.linear.")
