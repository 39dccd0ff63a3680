"""Initial values of the parameters of a data-dependent decay, e^(-A softplus(x + bias)), as the authors' code has them.

docs/initial_values.md says where other initial values differ from the authors'.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_uniform_decay(whole: Tensor, generator: torch.Generator) -> None:
    """log(A), A uniform in [1, 16): Mamba-2's."""
    whole.uniform_(1.0, 16.0, generator=generator).log_()


def log_uniform_decay_from_zero(whole: Tensor, generator: torch.Generator) -> None:
    """log(A), A uniform in (0, 16): gated DeltaNet's. A is at least 2^-20, as the logarithm of 0 would never move."""
    whole.uniform_(0.0, 16.0, generator=generator).clamp_(min=2.0**-20).log_()


def inverse_softplus_step(whole: Tensor, generator: torch.Generator) -> None:
    """The bias: softplus^-1 of step sizes log-uniform in [0.001, 0.1)."""
    whole.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp_()
    whole.add_(torch.log(-torch.expm1(-whole)))
