"""Tensors on the meta device, and the tensors that autograd saves for calls with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def meta(*shape: int, requires_grad: bool = True, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype, requires_grad=requires_grad)


def saved_sizes(call: Callable[[], Any]) -> list[int]:
    """Return the sizes in bytes of the tensors that autograd saves for a call."""
    found: dict[int, int] = {}

    def record(x: Tensor) -> None:
        found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        results = call()
    assert results is not None
    return sorted(found.values())
