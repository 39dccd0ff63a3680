"""Initializers of a data-dependent decay e^(-A softplus(x + bias)), as in the authors' code.

docs/initial_values.md lists where other initial values differ from the authors'.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_uniform_decay(whole: Tensor, generator: torch.Generator) -> None:
    """Fill with log(A), A uniform in [1, 16), as in Mamba-2."""
    whole.uniform_(1.0, 16.0, generator=generator).log_()


def log_uniform_decay_from_zero(whole: Tensor, generator: torch.Generator) -> None:
    """Fill with log(A), A uniform in (0, 16), as in gated DeltaNet.

    A is at least 2^-20: a parameter of log(0) would never change.
    """
    whole.uniform_(0.0, 16.0, generator=generator).clamp_(min=2.0**-20).log_()


def inverse_softplus_step(whole: Tensor, generator: torch.Generator) -> None:
    """Fill the bias with softplus^-1 of step sizes log-uniform in [0.001, 0.1)."""
    whole.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp_()
    whole.add_(torch.log(-torch.expm1(-whole)))
