"""Context manager that runs a model in float64, including operations that its code performs in fp32.

In a deep state-space model, each layer amplifies rounding errors as well as wrong weights. In fp32, two correct
implementations can therefore differ as much as a correct and a wrong one. In float64, rounding errors are 2^29 times
smaller, and the effect of wrong weights is the same.
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

from kernels.common.tensor_cache import clear_tensor_caches
from megatron_ext.mixers.core import rotary


@contextmanager
def in_float64(modules: Iterable[ModuleType] = ()) -> Iterator[None]:
    """Return a context manager in which fp32 tensors and computations are float64, except for rotary frequencies.

    Rotary frequencies keep their fp32 values, because transformers computes them in fp32.

    Args:
        modules: modules besides our own with a function `frequencies(width, base)`.
    """
    default_dtype = torch.get_default_dtype()
    frequencies = cache(rotary.frequencies)
    fp32_frequencies = _without_float64_mode(frequencies)
    with ExitStack() as stack:
        for module in (rotary, *modules):
            stack.enter_context(patch.object(module, "frequencies", fp32_frequencies))
        clear_tensor_caches()
        stack.callback(clear_tensor_caches)
        torch.set_default_dtype(torch.float64)
        stack.callback(torch.set_default_dtype, default_dtype)
        stack.enter_context(_Float64Mode())
        yield


def _without_float64_mode(function: Any) -> Any:
    """Wrap a function so that it runs outside of the mode and its result is converted to float64."""

    def call(*arguments: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            result: Tensor = function(*arguments).double()
        return result

    return call


class _Float64Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        return func(*tree_map(_widen_dtype, tuple(args)), **tree_map(_widen_dtype, kwargs or {}))


def _widen_dtype(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
