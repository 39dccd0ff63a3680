"""Shared parts of the tests of stateful ops."""

import torch


def first_state(heads=3, dk=6, dv=5):
    """Return an initial state [2, heads, dk, dv] in float64."""
    return torch.randn(2, heads, dk, dv, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
