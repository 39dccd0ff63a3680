"""Memory use of compiled functions on meta tensors: such a function counts as one kernel without intermediates.

The layers of a model call the same functions with the same shapes. If a result depends only on its arguments, it is
cached, and later calls allocate the outputs without running the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

_depth = 0


def within_one_kernel() -> bool:
    """Return True inside `one_kernel`, where intermediate tensors take no GPU memory."""
    return _depth > 0


@contextmanager
def one_kernel() -> Iterator[None]:
    """Context manager that counts the computation inside as one kernel."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def as_one_kernel(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, compiled on a GPU, on meta tensors; its intermediate tensors count no memory."""
    arguments, tensors = _TreeTemplate.of((args, kwargs)), _tensors_of((args, kwargs))
    call_type = _MemoizedCall if _is_cacheable(function, arguments, tensors) else _Call
    call = call_type(function, arguments, tensors)
    outputs = _OneKernel.apply(call, *tensors)
    return call.result.fill(outputs)


def _tensors_of(tree: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class _TreeTemplate(NamedTuple):
    """Nested tuples, lists and dictionaries with their tensors removed.

    Attributes:
        leaves: leaves of the structure, with the class `Tensor` in place of each tensor.
        types: types of the leaves. 2 and 2.0 compare equal but may give different dtypes.
        spec: nesting of the structure.
    """

    leaves: tuple[Any, ...]
    types: tuple[type, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, tree: Any) -> _TreeTemplate:
        """Remove the tensors of a structure."""
        leaves, spec = tree_flatten(tree)
        placeholders = tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(placeholders, tuple(map(type, placeholders)), spec)

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Return the structure with these tensors in their places."""
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if leaf is Tensor else leaf for leaf in self.leaves], self.spec)


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call | _MemoizedCall, *tensors: Tensor) -> Any:
        ctx.call = call
        with one_kernel():
            outputs, saved = call.forward(tensors)
            ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with one_kernel():
            return None, *ctx.call.backward(grads)


class _Call:
    """A function call that runs the function.

    Attributes:
        result: structure of the returned value without its tensors.
    """

    result: _TreeTemplate

    def __init__(self, function: Callable[..., Any], arguments: _TreeTemplate, tensors: Sequence[Tensor]) -> None:
        self._function, self._arguments = function, arguments
        self._inputs = [_TensorMeta.of(x) for x in tensors]

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return the outputs and the tensors that are saved for the backward pass."""
        saved: list[Tensor] = []
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(partial(_record, saved), lambda x: x):
            outputs = tuple(x.detach() for x in self._outputs(inputs))
        return outputs, _smaller_set(saved, inputs)

    def backward(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of all inputs, None for those that need none."""
        with torch.enable_grad():
            inputs = [each.create() for each in self._inputs]
            pairs = [(x, grad) for x, grad in zip(self._outputs(inputs), grads, strict=True) if x.requires_grad]
            differentiated = [x for x in inputs if x.requires_grad]
            outputs, grads_of_outputs = [x for x, _ in pairs], [grad for _, grad in pairs]
            input_grads = iter(torch.autograd.grad(outputs, differentiated, grads_of_outputs, allow_unused=True))
        return [next(input_grads) if x.requires_grad else None for x in inputs]

    def _outputs(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        args, kwargs = self._arguments.fill(tensors)
        result = self._function(*args, **kwargs)
        self.result = _TreeTemplate.of(result)
        return _tensors_of(result)


class _TensorMeta(NamedTuple):
    """Shape, strides and dtype of a tensor, from which a meta tensor is created without keeping the original alive.

    Attributes:
        original: the tensor itself if it has data, else None.
    """

    original: Tensor | None
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, x: Tensor) -> _TensorMeta:
        """Describe a tensor."""
        return cls(None if x.is_meta else x, x.shape, x.stride(), x.dtype, x.requires_grad)

    def create(self) -> Tensor:
        """Create such a meta tensor; a tensor with data is returned itself."""
        if self.original is not None:
            return self.original
        x = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        return x.requires_grad_(self.requires_grad)


def _record(saved: list[Tensor], x: Tensor) -> None:
    """Record a saved tensor. Nothing unpacks it later, so the hook returns None."""
    saved.append(x.detach())


def _smaller_set(saved: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that compiled code saves: those of the eager function, or all inputs if they are smaller."""
    eager, given = _by_storage(saved), _by_storage(inputs)
    intermediate_bytes = sum(x.untyped_storage().nbytes() for key, x in eager.items() if key not in given)
    input_bytes = sum(x.untyped_storage().nbytes() for key, x in given.items() if key not in eager)
    return list((eager if intermediate_bytes <= input_bytes else given).values())


def _by_storage(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    return {x.untyped_storage()._cdata: x for x in tensors}


# --- Cached calls: the result depends only on the tensors' layouts and the plain arguments ----------------------------

PLAIN_TYPES = (bool, int, float, str, type(None), torch.dtype)


def _is_cacheable(function: Callable[..., Any], arguments: _TreeTemplate, tensors: Sequence[Tensor]) -> bool:
    """Return True if a function takes only meta tensors and plain values and has no closure."""
    is_plain = isinstance(function, BuiltinFunctionType) or (
        isinstance(function, FunctionType) and function.__closure__ is None
    )
    others = [leaf for leaf in arguments.leaves if leaf is not Tensor]
    return is_plain and all(x.is_meta for x in tensors) and all(isinstance(leaf, PLAIN_TYPES) for leaf in others)


class _StorageView(NamedTuple):
    """Description of a tensor as a view of a storage.

    Attributes:
        storage: index of the storage; storages of existing tensors come first, then new ones.
        nbytes: bytes of the storage.
        size: shape of the tensor; the other attributes describe the tensor, too.
    """

    storage: int
    nbytes: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool


class _CachedCall(NamedTuple):
    """Cached result of a call: the outputs, the tensors saved for the backward pass and the returned structure."""

    outputs: tuple[_StorageView, ...]
    saved: tuple[_StorageView, ...]
    result: _TreeTemplate


class _MemoizedCall:
    """A function call like `_Call` that reuses the result of an earlier call with equal arguments."""

    result: _TreeTemplate

    def __init__(self, function: Callable[..., Any], arguments: _TreeTemplate, tensors: Sequence[Tensor]) -> None:
        self._key = function, arguments, _views_of(tensors)

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return the outputs and the tensors that are saved for the backward pass."""
        cached = _cached_forward(*self._key)
        self.result = cached.result
        outputs = _create(cached.outputs, tensors)
        return tuple(outputs), _create(cached.saved, [*tensors, *outputs])

    def backward(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of all inputs, None for those that need none."""
        cached = _cached_backward(*self._key, _views_of(grads))
        input_grads = iter(_create([view for view in cached if view is not None], grads))
        return [None if view is None else next(input_grads) for view in cached]


@lru_cache(maxsize=1024)
def _cached_forward(
    function: Callable[..., Any], arguments: _TreeTemplate, inputs: tuple[_StorageView, ...]
) -> _CachedCall:
    tensors = _create(inputs)
    call = _Call(function, arguments, tensors)
    outputs, saved = call.forward(tensors)
    return _CachedCall(_views_of(outputs, tensors), _views_of(saved, [*tensors, *outputs]), call.result)


@lru_cache(maxsize=1024)
def _cached_backward(
    function: Callable[..., Any],
    arguments: _TreeTemplate,
    inputs: tuple[_StorageView, ...],
    grads_of_outputs: tuple[_StorageView, ...],
) -> tuple[_StorageView | None, ...]:
    grads = _create(grads_of_outputs)
    input_grads = _Call(function, arguments, _create(inputs)).backward(grads)
    views = iter(_views_of([x for x in input_grads if x is not None], grads))
    return tuple(None if x is None else next(views) for x in input_grads)


def _views_of(tensors: Sequence[Tensor], existing: Sequence[Tensor] = ()) -> tuple[_StorageView, ...]:
    """Describe tensors, which may share storages with the existing tensors."""
    storage_indices = {key: index for index, key in enumerate(_by_storage([*existing, *tensors]))}
    return tuple(
        _StorageView(
            storage_indices[x.untyped_storage()._cdata],
            x.untyped_storage().nbytes(),
            x.shape,
            x.stride(),
            int(x.storage_offset()),
            x.dtype,
            x.requires_grad,
        )
        for x in tensors
    )


def _create(views: Sequence[_StorageView], existing: Sequence[Tensor] = ()) -> list[Tensor]:
    """Create the described meta tensors, in the existing tensors' storages or in new ones."""
    storages = [x.untyped_storage() for x in _by_storage(existing).values()]
    tensors = []
    for view in views:
        while view.storage >= len(storages):  # storages are numbered in order of first use
            storages.append(torch.empty(view.nbytes, dtype=torch.uint8, device="meta").untyped_storage())
        x = torch.empty(0, dtype=view.dtype, device="meta")
        x.set_(storages[view.storage], view.offset, view.size, view.stride)
        tensors.append(x.requires_grad_(view.requires_grad))
    return tensors
