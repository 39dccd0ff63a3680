"""One layer's mixer as it is timed: hidden states to hidden states, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A mixer with its projections.

    Attributes:
        run: hidden states to hidden states, both [t, b, hidden] or both [b, t, hidden], in bf16.
        parameters: weights whose gradients a training step needs.
        sequence_first: whether it is [t, b, hidden].
        note: what a reader of its numbers must know.
    """

    run: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]
    sequence_first: bool
    note: str | None = None


def hidden_states(layer: Layer, *, length: int, batch: int, hidden: int, seed: int, device: torch.device) -> Tensor:
    """Standard normal bf16 hidden states, as the norm before a mixer leaves them; their gradient is asked for."""
    sizes = (length, batch) if layer.sequence_first else (batch, length)
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(*sizes, hidden, generator=generator, device=device, dtype=torch.bfloat16)
    return x.requires_grad_()


def training_pass(layer: Layer, x: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """One call: the forward, and the gradients of the hidden states and of every weight.

    Args:
        layer: what is called.
        x: hidden states, see `hidden_states`.
    """
    grad = torch.randn_like(x)
    # A layer of fla's may have weights that a model's first layer has no use for.
    wanted = [x, *layer.parameters]

    def forward_backward() -> tuple[Tensor, ...]:
        out = layer.run(x)
        return out, *torch.autograd.grad(out, wanted, grad, allow_unused=True)

    return forward_backward
