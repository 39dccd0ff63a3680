"""Running a model whose weights are not in memory: each part's are read when its turn comes, and dropped after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter


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
def staged(model: Module, read: Callable[[str], Tensor], keep: Collection[str] = ()) -> Iterator[None]:
    """Within it, a model without numbers can be run, without gradients.

    The parts are the members of its module lists (its layers), and what else has parameters of its own.

    Args:
        model: its parameters on the meta device.
        read: a parameter's numbers, by the name that `named_parameters` gives it.
        keep: parts, by the beginning of their parameters' names, whose numbers others use, and which are not dropped.
    """
    handles = []
    for name, part in _parts(model):
        handles.append(part.register_forward_pre_hook(_Fill(name, part, read), prepend=True))
        if name not in keep:
            handles.append(part.register_forward_hook(_drop, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _parts(model: Module, prefix: str = "") -> Iterator[tuple[str, Module]]:
    for name, child in model.named_children():
        if isinstance(child, torch.nn.ModuleList):
            yield from ((f"{prefix}{name}.{number}.", layer) for number, layer in enumerate(child))
        elif child._parameters:
            yield f"{prefix}{name}.", child
        else:
            yield from _parts(child, f"{prefix}{name}.")


class _Fill:
    def __init__(self, prefix: str, part: Module, read: Callable[[str], Tensor]) -> None:
        self._prefix, self._part, self._read = prefix, part, read

    def __call__(self, *_: Any) -> None:
        for name, parameter in list(self._part.named_parameters()):
            _put(self._part, name, parameter, self._read(self._prefix + name))


def _drop(part: Module, *_: Any) -> None:
    for name, parameter in list(part.named_parameters()):
        _put(part, name, parameter, parameter.detach().to("meta"))


def _put(part: Module, name: str, parameter: Parameter, numbers: Tensor) -> None:
    *path, last = name.split(".")
    new = Parameter(numbers, requires_grad=False)
    vars(new).update(vars(parameter))
    part.get_submodule(".".join(path))._parameters[last] = new
