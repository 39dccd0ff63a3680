"""Forward and backward pass of one layer's mixer, as a function to time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Mixer with its projections.

    Attributes:
        run: maps hidden states to hidden states in bf16, both [t, b, hidden] or both [b, t, hidden].
        parameters: weights whose gradients a training step needs.
        sequence_first: the layout is [t, b, hidden].
        note: remark that readers of the numbers need.
    """

    run: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]
    sequence_first: bool
    note: str | None = None


def hidden_states(layer: Layer, *, length: int, batch: int, hidden: int, seed: int, device: torch.device) -> Tensor:
    """Return standard normal bf16 hidden states that require a gradient, as the norm before a mixer would produce."""
    sizes = (length, batch) if layer.sequence_first else (batch, length)
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(*sizes, hidden, generator=generator, device=device, dtype=torch.bfloat16)
    return x.requires_grad_()


def training_pass(layer: Layer, x: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that computes the forward pass and the gradients of the hidden states and of every weight.

    Args:
        layer: to call.
        x: hidden states, see `hidden_states`.
    """
    grad = torch.randn_like(x)
    # A layer of fla may have weights that are unused in a model's first layer.
    inputs = [x, *layer.parameters]

    def forward_backward() -> tuple[Tensor, ...]:
        out = layer.run(x)
        return out, *torch.autograd.grad(out, inputs, grad, allow_unused=True)

    return forward_backward
