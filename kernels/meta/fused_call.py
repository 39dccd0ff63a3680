"""Memory of compiled functions on meta tensors: a compiled function counts as one kernel without intermediates.

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


def as_one_kernel(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Call a function, compiled on a GPU, on meta tensors; its intermediate tensors count no memory."""
    mold, tensors = _Mold.of((args, more)), _tensors_of((args, more))
    kind = _KnownCall if _is_known_by_forms(function, mold, tensors) else _Call
    call = kind(function, mold, tensors)
    outputs = _OneKernel.apply(call, *tensors)
    return call.result.filled(outputs)


def _tensors_of(tree: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class _Mold(NamedTuple):
    """Nested tuples, lists and dictionaries with their tensors removed.

    Attributes:
        leaves: leaves of the structure, with the class `Tensor` in place of each tensor.
        kinds: types of the leaves. 2 and 2.0 compare equal but may give different dtypes.
        spec: nesting of the structure.
    """

    leaves: tuple[Any, ...]
    kinds: tuple[type, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, tree: Any) -> _Mold:
        """Remove the tensors of a structure."""
        leaves, spec = tree_flatten(tree)
        without = tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(without, tuple(map(type, without)), spec)

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return the structure with these tensors in their places."""
        rest = iter(tensors)
        return tree_unflatten([next(rest) if leaf is Tensor else leaf for leaf in self.leaves], self.spec)


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call | _KnownCall, *tensors: Tensor) -> Any:
        ctx.call = call
        with one_kernel():
            outputs, kept = call.forward(tensors)
            ctx.save_for_backward(*kept)
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

    result: _Mold

    def __init__(self, function: Callable[..., Any], mold: _Mold, tensors: Sequence[Tensor]) -> None:
        self._function, self._mold = function, mold
        self._forms = [_form_of(x) for x in tensors]

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return the outputs and the tensors that are saved for the backward pass."""
        saved: list[Tensor] = []
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(partial(_noted, saved), lambda x: x):
            outputs = tuple(x.detach() for x in self._outputs(inputs))
        return outputs, _kept(saved, inputs)

    def backward(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of all inputs, None for those that need none."""
        with torch.enable_grad():
            inputs = [form.made() for form in self._forms]
            learned = [(x, grad) for x, grad in zip(self._outputs(inputs), grads, strict=True) if x.requires_grad]
            wanted = [x for x in inputs if x.requires_grad]
            outputs, theirs = [x for x, _ in learned], [grad for _, grad in learned]
            found = iter(torch.autograd.grad(outputs, wanted, theirs, allow_unused=True))
        return [next(found) if x.requires_grad else None for x in inputs]

    def _outputs(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        args, more = self._mold.filled(tensors)
        result = self._function(*args, **more)
        self.result = _Mold.of(result)
        return _tensors_of(result)


class _Form(NamedTuple):
    """Layout of a tensor, from which an equal one is created later without keeping the tensor alive."""

    like: Tensor | None
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def made(self) -> Tensor:
        """Create a meta tensor of this layout; a tensor with data is returned itself."""
        if self.like is not None:
            return self.like
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        return made.requires_grad_(self.requires_grad)


def _form_of(x: Tensor) -> _Form:
    return _Form(None if x.is_meta else x, x.shape, x.stride(), x.dtype, x.requires_grad)


def _noted(saved: list[Tensor], x: Tensor) -> None:
    """Record a saved tensor. Nothing unpacks it later, so the hook returns None."""
    saved.append(x.detach())


def _kept(saved: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that compiled code saves: those of the eager function, or all inputs if they are smaller."""
    own, given = _by_storage(saved), _by_storage(inputs)
    between = sum(x.untyped_storage().nbytes() for key, x in own.items() if key not in given)
    others = sum(x.untyped_storage().nbytes() for key, x in given.items() if key not in own)
    return list((own if between <= others else given).values())


def _by_storage(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    return {x.untyped_storage()._cdata: x for x in tensors}


# --- Cached calls: the result depends only on the tensors' layouts and the plain arguments ----------------------------

PLAIN = (bool, int, float, str, type(None), torch.dtype)


def _is_known_by_forms(function: Callable[..., Any], mold: _Mold, tensors: Sequence[Tensor]) -> bool:
    """Return True if a function takes only meta tensors and plain values and has no closure."""
    is_plain = isinstance(function, BuiltinFunctionType) or (
        isinstance(function, FunctionType) and function.__closure__ is None
    )
    others = [leaf for leaf in mold.leaves if leaf is not Tensor]
    return is_plain and all(x.is_meta for x in tensors) and all(isinstance(leaf, PLAIN) for leaf in others)


class _Place(NamedTuple):
    """Layout of a tensor, including its storage.

    Attributes:
        storage: number of the storage: those of given tensors come first, then new ones.
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


class _Known(NamedTuple):
    """Cached result of a call: layouts of the outputs and of the saved tensors, and the returned structure."""

    outputs: tuple[_Place, ...]
    kept: tuple[_Place, ...]
    result: _Mold


class _KnownCall:
    """A function call like `_Call` that reuses the result of an earlier call with the same layouts."""

    result: _Mold

    def __init__(self, function: Callable[..., Any], mold: _Mold, tensors: Sequence[Tensor]) -> None:
        self._key = function, mold, _places_of(tensors)

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return the outputs and the tensors that are saved for the backward pass."""
        known = _forward(*self._key)
        self.result = known.result
        outputs = _laid(known.outputs, tensors)
        return tuple(outputs), _laid(known.kept, [*tensors, *outputs])

    def backward(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of all inputs, None for those that need none."""
        known = _backward(*self._key, _places_of(grads))
        learned = iter(_laid([place for place in known if place is not None], grads))
        return [None if place is None else next(learned) for place in known]


@lru_cache(maxsize=1024)
def _forward(function: Callable[..., Any], mold: _Mold, places: tuple[_Place, ...]) -> _Known:
    tensors = _laid(places)
    call = _Call(function, mold, tensors)
    outputs, kept = call.forward(tensors)
    return _Known(_places_of(outputs, tensors), _places_of(kept, [*tensors, *outputs]), call.result)


@lru_cache(maxsize=1024)
def _backward(
    function: Callable[..., Any], mold: _Mold, places: tuple[_Place, ...], grad_places: tuple[_Place, ...]
) -> tuple[_Place | None, ...]:
    grads = _laid(grad_places)
    found = _Call(function, mold, _laid(places)).backward(grads)
    learned = iter(_places_of([x for x in found if x is not None], grads))
    return tuple(None if x is None else next(learned) for x in found)


def _places_of(tensors: Sequence[Tensor], given: Sequence[Tensor] = ()) -> tuple[_Place, ...]:
    """Return the layouts of tensors, which may share storages with the given tensors."""
    numbers = {key: number for number, key in enumerate(_by_storage([*given, *tensors]))}
    return tuple(
        _Place(
            numbers[x.untyped_storage()._cdata],
            x.untyped_storage().nbytes(),
            x.shape,
            x.stride(),
            int(x.storage_offset()),
            x.dtype,
            x.requires_grad,
        )
        for x in tensors
    )


def _laid(places: Sequence[_Place], given: Sequence[Tensor] = ()) -> list[Tensor]:
    """Create meta tensors of these layouts: views of the given tensors' storages, or of new storages."""
    storages = [x.untyped_storage() for x in _by_storage(given).values()]
    made = []
    for place in places:
        while place.storage >= len(storages):  # storages are numbered in order of first use
            storages.append(torch.empty(place.nbytes, dtype=torch.uint8, device="meta").untyped_storage())
        x = torch.empty(0, dtype=place.dtype, device="meta")
        x.set_(storages[place.storage], place.offset, place.size, place.stride)
        made.append(x.requires_grad_(place.requires_grad))
    return made
