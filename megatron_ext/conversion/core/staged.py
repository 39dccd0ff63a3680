"""Running a model whose weights stay on disk.

Each weight is read by the operation that uses it, and freed afterwards.
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

PIECE = 1 << 21
"""Elements of a matrix that are converted to float64 or fp32 at a time: 16 MiB in float64."""


@contextmanager
def on_meta() -> Iterator[None]:
    """Return a context manager in which parameters of new modules are created on the meta device.

    Buffers are not affected.
    """
    register = Module.register_parameter

    def without_numbers(module: Module, name: str, parameter: Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # a shared parameter, already replaced, stays shared
            empty = Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            vars(empty).update(vars(parameter))
            module._parameters[name] = empty

    Module.register_parameter = without_numbers  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def staged(model: Module, read: Callable[[str], Tensor]) -> Iterator[None]:
    """Return a context manager in which a model on the meta device can be run in fp32, without gradients.

    Within `in_float64` the model runs in float64.

    Args:
        model: model with parameters on the meta device.
        read: returns the values of a parameter in any dtype, by its name in `named_parameters`.
    """
    replaced = []
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        replaced.append((module, last, parameter))
        module._parameters[last] = Unread.of(parameter, partial(read, name))  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, last, parameter in replaced:
            module._parameters[last] = parameter


@contextmanager
def of_last_positions(output_layer: Module, kept: int, dim: int) -> Iterator[None]:
    """Return a context manager in which an output layer computes logits only for the last positions.

    Args:
        output_layer: layer whose first input is the hidden states.
        kept: maximum number of positions.
        dim: dimension of the positions.
    """

    def cut(_: Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *more = inputs
        count = min(kept, hidden.shape[dim])
        return hidden.narrow(dim, hidden.shape[dim] - count, count), *more

    handle = output_layer.register_forward_pre_hook(cut)
    try:
        yield
    finally:
        handle.remove()


class Unread(Tensor):
    """Weight on disk that has a shape and is read by each operation that uses it.

    Matrix products convert the stored weight in pieces. Embedding lookups convert only the rows that they return. All
    other operations convert the whole weight to fp32, or to float64 within `in_float64`.
    """

    _is_param = True  # checked by torch's isinstance(x, Parameter)
    _read: Callable[[], Tensor]
    _is_turned: bool
    device = torch.device("cpu")  # device of the values once they are read
    is_meta = False

    @staticmethod
    def of(empty: Tensor, read: Callable[[], Tensor], *, is_turned: bool = False) -> Unread:
        """Create a weight that is read by a function.

        Args:
            empty: tensor with its shape, and with attributes that other code expects.
            read: returns the values.
            is_turned: whether the weight is the transpose of the values.
        """
        weight: Unread = Tensor._make_subclass(Unread, empty.detach())
        vars(weight).update(vars(empty))
        weight._read, weight._is_turned = read, is_turned
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Implement torch's `__torch_function__`: read the weights among the arguments, then call the function."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_SHAPE or getattr(func, "__name__", "") == "__get__":
                return func(*args, **kwargs)
            if func in (Tensor.t, torch.t) and not args[0]._is_turned:
                return cls.of(func(Tensor.as_subclass(args[0], Tensor)), args[0]._read, is_turned=True)
            if func in _PRODUCTS and not kwargs and _is_matrix(args[1], turned=True):
                return _product(_numbers(args[0]), args[1])
            if func is F.linear and _is_matrix(args[1], turned=False):
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                product = _product(_numbers(args[0]), args[1])
                return product if bias is None else product + _numbers(bias)
            if func is F.embedding and _is_matrix(args[1], turned=False):
                return func(args[0], args[1]._read(), *args[2:], **kwargs).to(_wide())
            return func(*tree_map(_numbers, tuple(args)), **tree_map(_numbers, kwargs))


_OF_SHAPE = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.__len__, Tensor.is_floating_point}
_PRODUCTS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}


def _wide() -> torch.dtype:
    """Return the dtype that weights are converted to: torch's default dtype, which `in_float64` changes."""
    return torch.get_default_dtype()


def _is_matrix(weight: Any, *, turned: bool) -> bool:
    return isinstance(weight, Unread) and weight._is_turned == turned and weight.dim() == 2


def _numbers(value: Any) -> Any:
    if not isinstance(value, Unread):
        return value
    numbers = value._read().to(_wide())
    return numbers.t() if value._is_turned else numbers


def _product(x: Tensor, weight: Unread) -> Tensor:
    """Return the product of x, [..., n], with the transpose of a matrix [m, n]: [..., m].

    Only some rows of the matrix are converted at a time.
    """
    stored = weight._read()
    product = x.new_empty(*x.shape[:-1], len(stored))
    rows = max(1, PIECE // max(1, stored.shape[1]))
    for made, piece in zip(product.split(rows, -1), stored.split(rows), strict=True):
        made.copy_(F.linear(x, piece.to(_wide())))
    return product
