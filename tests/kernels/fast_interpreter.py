"""Faster versions of some functions of Triton's interpreter, with equal results.

At every call of a device function the interpreter searches modules for functions to replace. At every operation it
builds a table of dtypes, checks and wraps every dimension of every block, broadcasts even blocks of equal shapes, and
computes overflows that it does not report. It reduces element by element. Most of the time of our kernels' tests was
spent so.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

_builtin_names: dict[int, tuple[Any, list[str]]] = {}
"""Module or class, and the names of its Triton built-ins, by its id. The reference keeps the id from being reused."""

_np_dtypes: dict[str, np.dtype] = {}
"""NumPy dtype by the name of a scalar Triton dtype."""

_patched: set[int] = set()
"""Ids of the `__globals__` of functions whose modules are already patched for the interpreter."""

_block_shapes: dict[tuple[int, ...], tuple[Any, int, str]] = {}
"""Shape, number of elements and text of the shape of a block type, by its dimensions. Types share the shape object."""

_tensor_shapes: dict[int, tuple[Any, Any, Any]] = {}
"""Shape of a block type, and shape and number of elements of its tensors, by the id of the type's shape."""

_init_block_type, _init_tensor = tl.block_type.__init__, tl.tensor.__init__
_search_np_dtype = interpreter._get_np_dtype
convert_float = interpreter._convert_float
_broadcast_shapes = TritonSemantic.broadcast_impl_value
reduce_elements, scan_elements = interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan


def install() -> None:
    """Replace the slow functions in this process."""
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _get_np_dtype
    interpreter._convert_float = convert_bfloat16
    interpreter.InterpretedFunction.__call__ = _call_device_function
    # The interpreter computes all integers twice to find overflows, but asserts nothing unless `debug` is set.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    TritonSemantic.broadcast_impl_value = _broadcast
    tl.block_type.__init__ = _share_block_shape
    tl.tensor.__init__ = _share_tensor_shape
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


def _call_device_function(self: interpreter.InterpretedFunction, *args: Any, **options: Any) -> Any:
    """Patch the modules that the function uses once. The interpreter does so at every call, and never undoes it."""
    if id(self.fn.__globals__) not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(id(self.fn.__globals__))
    try:
        return self.rewrite()(*args, **options)
    except Exception as error:
        raise InterpreterError(repr(error)) from error


def _share_block_shape(self: tl.block_type, element_ty: tl.dtype, shape: Sequence[Any]) -> None:
    key = tuple(x.value if isinstance(x, tl.constexpr) else x for x in shape)
    if key not in _block_shapes:
        _init_block_type(self, element_ty, shape)
        _block_shapes[key] = self.shape, self.numel, str(self.shape)
    self.element_ty = element_ty
    self.shape, self.numel, text = _block_shapes[key]
    self.name = f"<{text}, {element_ty}>"


def _share_tensor_shape(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    key = type.shape if type.is_block() else ()
    if id(key) not in _tensor_shapes:
        _init_tensor(self, handle, type)
        _tensor_shapes[id(key)] = key, self.shape, self.numel
    self.handle, self.type, self.dtype = handle, type, type.scalar
    _, self.shape, self.numel = _tensor_shapes[id(key)]


def _broadcast(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
        return lhs, rhs
    return _broadcast_shapes(self, lhs, rhs)


def convert_bfloat16(x: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
    """Implement `_convert_float`: convert bf16 to fp32, or truncate fp32 to bf16, by a shift. Return the bits.

    Subnormal numbers and other dtypes are left to the interpreter.
    """
    if rounding is None and (source.name, target.name) in (("bf16", "fp32"), ("fp32", "bf16")):
        bits = x.view(np.uint16 if source.name == "bf16" else np.uint32)
        exponent, mantissa = (0x7F80, 0x7F) if source.name == "bf16" else (0x7F800000, 0x7FFFFF)
        if not ((bits & exponent == 0) & (bits & mantissa != 0)).any():
            bits = bits.astype(np.uint32, order="C")
            return bits << 16 if source.name == "bf16" else (bits >> 16).astype(np.uint16)
    return convert_float(x, source, target, rounding)


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
