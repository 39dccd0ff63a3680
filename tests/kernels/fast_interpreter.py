"""Faster versions of four functions of Triton's interpreter, with equal results.

The interpreter searches modules for functions to replace at every call of a device function, builds a table of dtypes
at every operation, and reduces element by element. That is more than half of the time of our kernels' tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter

_builtin_names: dict[int, tuple[Any, list[str]]] = {}
"""For the id of a module or class: it, and the names of its built-in functions."""

_np_dtypes: dict[str, np.dtype] = {}
"""NumPy dtype by the name of a scalar Triton dtype."""

_search_np_dtype = interpreter._get_np_dtype
reduce_elements, scan_elements = interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan


def install() -> None:
    """Replace the slow functions in this process."""
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _get_np_dtype
    interpreter.ReduceOps.generic_reduce = reduce_slices
    interpreter.ScanOps.generic_scan = scan_slices


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    if id(package) not in _builtin_names:
        names = [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
        _builtin_names[id(package)] = package, names
    for name in _builtin_names[id(package)][1]:
        member = getattr(package, name)
        if tl.core.is_builtin(member):  # otherwise it is already patched
            interpreter._patch_attr(package, name, member, builder, scope)


def _get_np_dtype(dtype: tl.dtype) -> np.dtype:
    if type(dtype) is not tl.dtype:
        return _search_np_dtype(dtype)
    if dtype.name not in _np_dtypes:
        _np_dtypes[dtype.name] = _search_np_dtype(dtype)
    return _np_dtypes[dtype.name]


def reduce_slices(self: Any, inputs: Sequence[tl.tensor]) -> list[tl.tensor]:
    """Implement `generic_reduce`: combine whole slices of the reduced axis, in the same order as single elements."""
    if self.axis is None:
        return reduce_elements(self, inputs)
    arrays = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
    totals = [array[0] for array in arrays]
    for index in range(1, len(arrays[0])):
        totals = _combine(self, inputs, totals, [array[index] for array in arrays])
    if self.keep_dims:
        totals = [np.expand_dims(total, self.axis) for total in totals]
    return [self.to_tensor(total, x.dtype) for total, x in zip(totals, inputs, strict=True)]


def scan_slices(self: Any, inputs: Sequence[tl.tensor]) -> list[tl.tensor]:
    """Implement `generic_scan`: combine whole slices of the scanned axis, in the same order as single elements."""
    arrays = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
    steps = [[array[0] for array in arrays]]
    for index in range(1, len(arrays[0])):
        steps.append(_combine(self, inputs, steps[-1], [array[index] for array in arrays]))
    outputs = [np.stack(slices, self.axis) for slices in zip(*steps, strict=True)]
    return [self.to_tensor(output, x.dtype) for output, x in zip(outputs, inputs, strict=True)]


def _combine(operation: Any, inputs: Sequence[tl.tensor], left: list[Any], right: list[Any]) -> list[Any]:
    """Apply the combine function to two lists of slices, and return slices of the inputs' dtypes."""
    dtypes = [x.dtype for x in inputs]
    operands = [operation.to_tensor(x, dtype) for x, dtype in zip(left + right, dtypes + dtypes, strict=True)]
    results = operation.combine_fn.fn(*operands)
    results = results if isinstance(results, tuple) else (results,)
    data = [x.handle.data if isinstance(x, tl.tensor) else np.asarray(x) for x in results]
    return [x.astype(a.dtype).reshape(a.shape) for x, a in zip(data, left, strict=True)]
