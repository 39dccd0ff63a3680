"""AdamW without torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _undecorated(method: _Method) -> _Method:
    """Return a method without its decorator, which imports torch's compiler when the method is first called."""
    undecorated: _Method = method.__wrapped__  # type: ignore[attr-defined]
    return undecorated


class AdamW(torch.optim.AdamW):
    """torch's AdamW with the same results, without the decorators that keep torch's compiler out of its methods.

    These decorators import the compiler, which takes most of a second in each process that trains. Without them,
    compiled code must not call the methods, and `differentiable=True` has no effect.
    """

    add_param_group = _undecorated(Optimizer.add_param_group)
    zero_grad = _undecorated(Optimizer.zero_grad)
    state_dict = _undecorated(Optimizer.state_dict)
    load_state_dict = _undecorated(Optimizer.load_state_dict)
    step = torch.no_grad()(_undecorated(torch.optim.AdamW.step))
