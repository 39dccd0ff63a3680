"""Execution of a model whose weights stay on disk.

Each operation reads the weights that it uses and frees them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn import functional as F
from torch.utils._pytree import tree_map

CHUNK_ELEMENTS = 1 << 21
"""Maximum number of elements of a matrix that are converted to float64 or fp32 at a time: 16 MiB in float64."""


@contextmanager
def on_meta() -> Iterator[None]:
    """Return a context manager in which parameters of new modules are created on the meta device.

    Buffers are not affected.
    """
    register = Module.register_parameter

    def register_on_meta(module: Module, name: str, parameter: Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # a shared parameter, already replaced, stays shared
            empty = Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            vars(empty).update(vars(parameter))
            module._parameters[name] = empty

    Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def read_on_use(model: Module, read: Callable[[str], Tensor]) -> Iterator[None]:
    """Return a context manager in which a model on the meta device can be run in fp32, without gradients.

    Within `in_float64` the model runs in float64.

    Args:
        model: model with parameters on the meta device.
        read: returns the values of a parameter in any dtype, by its name in `named_parameters`.
    """
    replaced = []
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        replaced.append((module, attribute, parameter))
        module._parameters[attribute] = DiskWeight.from_read(parameter, partial(read, name))  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, attribute, parameter in replaced:
            module._parameters[attribute] = parameter


@contextmanager
def last_positions_only(output_layer: Module, max_positions: int, dim: int) -> Iterator[None]:
    """Return a context manager in which an output layer computes logits only for the last positions.

    Args:
        output_layer: layer whose first input is the hidden states.
        max_positions: maximum number of positions.
        dim: dimension of the positions.
    """

    def narrow_hidden(_: Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *more = inputs
        count = min(max_positions, hidden.shape[dim])
        return hidden.narrow(dim, hidden.shape[dim] - count, count), *more

    handle = output_layer.register_forward_pre_hook(narrow_hidden)
    try:
        yield
    finally:
        handle.remove()


class DiskWeight(Tensor):
    """Weight on disk. It has a shape, and each operation that uses it reads its values.

    Matrix products convert the stored weight in chunks of rows. Embedding lookups convert only the rows that they
    return. All other operations convert the whole weight to fp32, or to float64 within `in_float64`.
    """

    _is_param = True  # checked by torch's isinstance(x, Parameter)
    _read: Callable[[], Tensor]
    _is_transposed: bool
    device = torch.device("cpu")  # device of the values once they are read
    is_meta = False

    @staticmethod
    def from_read(empty: Tensor, read: Callable[[], Tensor], *, is_transposed: bool = False) -> DiskWeight:
        """Create a weight.

        Args:
            empty: tensor with the weight's shape and attributes, such as those of tensor parallelism.
            read: returns the values.
            is_transposed: whether the weight is the transpose of the values.
        """
        weight: DiskWeight = Tensor._make_subclass(DiskWeight, empty.detach())
        vars(weight).update(vars(empty))
        weight._read, weight._is_transposed = read, is_transposed
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Implement torch's `__torch_function__`: read the weights among the arguments, then call the function."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SHAPE_METHODS or getattr(func, "__name__", "") == "__get__":
                return func(*args, **kwargs)
            if func in (Tensor.t, torch.t) and not args[0]._is_transposed:
                return cls.from_read(func(Tensor.as_subclass(args[0], Tensor)), args[0]._read, is_transposed=True)
            if func in _MATMULS and not kwargs and _is_matrix(args[1], transposed=True):
                return _matmul(_read_values(args[0]), args[1])
            if func is F.linear and _is_matrix(args[1], transposed=False):
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                product = _matmul(_read_values(args[0]), args[1])
                return product if bias is None else product + _read_values(bias)
            if func is F.embedding and _is_matrix(args[1], transposed=False):
                return func(args[0], args[1]._read(), *args[2:], **kwargs).to(_compute_dtype())
            return func(*tree_map(_read_values, tuple(args)), **tree_map(_read_values, kwargs))


_SHAPE_METHODS = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.__len__, Tensor.is_floating_point}
_MATMULS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}


def _compute_dtype() -> torch.dtype:
    """Return the dtype of computations: torch's default dtype, which `in_float64` changes."""
    return torch.get_default_dtype()


def _is_matrix(weight: Any, *, transposed: bool) -> bool:
    return isinstance(weight, DiskWeight) and weight._is_transposed == transposed and weight.dim() == 2


def _read_values(value: Any) -> Any:
    if not isinstance(value, DiskWeight):
        return value
    values = value._read().to(_compute_dtype())
    return values.t() if value._is_transposed else values


def _matmul(x: Tensor, weight: DiskWeight) -> Tensor:
    """Return the product of x, [..., n], and the transpose of a matrix [m, n]: [..., m].

    The rows of the matrix are converted in chunks.
    """
    stored = weight._read()
    product = x.new_empty(*x.shape[:-1], len(stored))
    rows = max(1, CHUNK_ELEMENTS // max(1, stored.shape[1]))
    for columns, chunk in zip(product.split(rows, -1), stored.split(rows), strict=True):
        columns.copy_(F.linear(x, chunk.to(_compute_dtype())))
    return product
