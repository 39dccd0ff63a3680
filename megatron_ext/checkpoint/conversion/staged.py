"""Running a model whose weights are not in memory: each is read by what computes with it, and dropped after that."""

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
"""Numbers of a matrix that are converted to float64 (or fp32) at a time: 16 MiB."""


@contextmanager
def on_meta() -> Iterator[None]:
    """Within it, parameters of new modules have shapes and types, and no numbers; buffers are as ever."""
    register = Module.register_parameter

    def without_numbers(module: Module, name: str, parameter: Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # one that is shared stays one
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
    """Within it, a model without numbers can be run in fp32, without gradients.

    Args:
        model: its parameters on the meta device.
        read: a parameter's numbers in any type, by the name that `named_parameters` gives it.
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
    """Within it, an output layer computes logits of the last positions alone.

    Args:
        output_layer: its first input are hidden states.
        kept: positions, at most.
        dim: of the positions.
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
    """A weight on the disk. It has its shape; what is computed with it reads it.

    A product with a matrix, and rows that are looked up in one, are made of it as it is stored; all else gets fp32, or
    float64 within `in_float64`.
    """

    _is_param = True  # as torch asks whether something is a Parameter
    _read: Callable[[], Tensor]
    _is_turned: bool
    device = torch.device("cpu")  # where its numbers will be
    is_meta = False

    @staticmethod
    def of(empty: Tensor, read: Callable[[], Tensor], *, is_turned: bool = False) -> Unread:
        """A weight that is read so.

        Args:
            empty: has its shape, and attributes that others look for.
            read: its numbers.
            is_turned: it is the transpose of what is read.
        """
        weight: Unread = Tensor._make_subclass(Unread, empty.detach())
        vars(weight).update(vars(empty))
        weight._read, weight._is_turned = read, is_turned
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """See torch's `__torch_function__`."""
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
    """What weights are made: torch's own type of numbers, which `in_float64` changes."""
    return torch.get_default_dtype()


def _is_matrix(weight: Any, *, turned: bool) -> bool:
    return isinstance(weight, Unread) and weight._is_turned == turned and weight.dim() == 2


def _numbers(value: Any) -> Any:
    if not isinstance(value, Unread):
        return value
    numbers = value._read().to(_wide())
    return numbers.t() if value._is_turned else numbers


def _product(x: Tensor, weight: Unread) -> Tensor:
    """Of x, [..., n], and the transpose of a matrix [m, n], some of whose rows are made fp32 at a time: [..., m]."""
    stored = weight._read()
    product = x.new_empty(*x.shape[:-1], len(stored))
    rows = max(1, PIECE // max(1, stored.shape[1]))
    for made, piece in zip(product.split(rows, -1), stored.split(rows), strict=True):
        made.copy_(F.linear(x, piece.to(_wide())))
    return product
