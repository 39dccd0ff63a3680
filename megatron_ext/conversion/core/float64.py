"""Running a model in float64 although its code converts to fp32 in places.

In a deep state-space model each layer amplifies rounding as it amplifies a fault. In fp32, two correct implementations
can therefore differ as much as a correct and a wrong one. In float64 rounding is 2^29 times smaller, and a fault has
the same size.
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

from megatron_ext.mixers.core import rotary


@contextmanager
def in_float64(modules: Iterable[ModuleType] = ()) -> Iterator[None]:
    """Return a context manager in which fp32 tensors and computations are float64, except for rotary frequencies.

    Rotary frequencies keep their fp32 values, because transformers defines them as fp32 numbers.

    Args:
        modules: further modules with a function `frequencies` of width and base, in addition to our own.
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
    """Wrap a function so that it runs outside of the mode and its result is converted to float64."""

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
