"""Initial values of the parameters of a data-dependent decay, e^(-A softplus(x + bias)), as Mamba-2's code has them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_uniform_decay(whole: Tensor, generator: torch.Generator) -> None:
    """log(A), A uniform in [1, 16)."""
    whole.uniform_(1.0, 16.0, generator=generator).log_()


def inverse_softplus_step(whole: Tensor, generator: torch.Generator) -> None:
    """The bias: softplus^-1 of step sizes log-uniform in [0.001, 0.1)."""
    whole.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp_()
    whole.add_(torch.log(-torch.expm1(-whole)))
