"""Running a model in float64 whose code says fp32 in places: there every fp32 is a float64.

In fp32 two right forms of a deep state-space model answer as differently as a wrong one: rounding is amplified from
layer to layer, as a fault is. In float64 it is 2^29 times smaller, and a fault as large as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from megatron_ext.mixers import rotary


@contextmanager
def in_float64(modules: Iterable[ModuleType] = ()) -> Iterator[None]:
    """Within it, what is made or computed in fp32 is in float64; rotary frequencies keep their fp32 values.

    Those are no rounding that a library is free in: transformers keeps them as fp32 numbers.

    Args:
        modules: beside our own, those with a function `frequencies` of width and base.
    """
    usual = torch.get_default_dtype()
    frequencies = cache(rotary.frequencies)
    rounded = _computed_as_ever(frequencies)
    with ExitStack() as stack:
        for module in (rotary, *modules):
            stack.enter_context(patch.object(module, "frequencies", rounded))
        rotary.rotation.cache_clear()
        stack.callback(rotary.rotation.cache_clear)
        torch.set_default_dtype(torch.float64)
        stack.callback(torch.set_default_dtype, usual)
        stack.enter_context(_Wide())
        yield


def _computed_as_ever(function: Any) -> Any:
    """A function whose result is computed outside of the mode, and is float64 afterwards."""

    def call(*arguments: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            found: Tensor = function(*arguments).double()
        return found

    return call


class _Wide(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        return func(*tree_map(_wide, tuple(args)), **tree_map(_wide, kwargs or {}))


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
