"""What is compiled on a GPU, on meta tensors: one kernel to memory, which has nothing of what comes between.

A model's layers compute in the same shapes: what a function made of such inputs once is made again without going
through it, where nothing but its arguments can make a difference.
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
    """Whether what is computed now is of one kernel: a GPU has no memory for what comes between."""
    return _depth > 0


@contextmanager
def one_kernel() -> Iterator[None]:
    """What is computed within counts as one kernel."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def as_one_kernel(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Call a function of meta tensors that is compiled on a GPU: what comes between its kernels takes no memory."""
    mold, tensors = _Mold.of((args, more)), _tensors_of((args, more))
    kind = _KnownCall if _is_known_by_forms(function, mold, tensors) else _Call
    call = kind(function, mold, tensors)
    outputs = _OneKernel.apply(call, *tensors)
    return call.result.filled(outputs)


def _tensors_of(tree: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class _Mold(NamedTuple):
    """Nested tuples, lists and dictionaries without their tensors.

    Attributes:
        leaves: what is in them, Tensor where a tensor was.
        kinds: of the leaves: 2 and 2.0 are equal, and do not make the same of whole numbers.
        spec: how they are nested.
    """

    leaves: tuple[Any, ...]
    kinds: tuple[type, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, tree: Any) -> _Mold:
        """What is left of them."""
        leaves, spec = tree_flatten(tree)
        without = tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(without, tuple(map(type, without)), spec)

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """They, with tensors in their places."""
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
    """A function's call, gone through.

    Attributes:
        result: what it returned, without its tensors.
    """

    result: _Mold

    def __init__(self, function: Callable[..., Any], mold: _Mold, tensors: Sequence[Tensor]) -> None:
        self._function, self._mold = function, mold
        self._forms = [_form_of(x) for x in tensors]

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Outputs, and what is kept for the backward pass."""
        saved: list[Tensor] = []
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(partial(_noted, saved), lambda x: x):
            outputs = tuple(x.detach() for x in self._outputs(inputs))
        return outputs, _kept(saved, inputs)

    def backward(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of all inputs."""
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
    """What a tensor was like, to make one like it that nobody keeps meanwhile."""

    like: Tensor | None
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def made(self) -> Tensor:
        """A meta tensor of that form; one with numbers in it is itself."""
        if self.like is not None:
            return self.like
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        return made.requires_grad_(self.requires_grad)


def _form_of(x: Tensor) -> _Form:
    return _Form(None if x.is_meta else x, x.shape, x.stride(), x.dtype, x.requires_grad)


def _noted(saved: list[Tensor], x: Tensor) -> None:
    """Take down what is saved, which nobody will ask for."""
    saved.append(x.detach())


def _kept(saved: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """What a compiler keeps: what the plain form does, or all inputs, where those between would take more."""
    own, given = _by_storage(saved), _by_storage(inputs)
    between = sum(x.untyped_storage().nbytes() for key, x in own.items() if key not in given)
    others = sum(x.untyped_storage().nbytes() for key, x in given.items() if key not in own)
    return list((own if between <= others else given).values())


def _by_storage(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    return {x.untyped_storage()._cdata: x for x in tensors}


# --- calls of which no more than the forms of their tensors makes a difference ----------------------------------------

PLAIN = (bool, int, float, str, type(None), torch.dtype)


def _is_known_by_forms(function: Callable[..., Any], mold: _Mold, tensors: Sequence[Tensor]) -> bool:
    """Whether a function is given nothing but meta tensors and numbers, and has nothing of its own."""
    is_plain = isinstance(function, BuiltinFunctionType) or (
        isinstance(function, FunctionType) and function.__closure__ is None
    )
    others = [leaf for leaf in mold.leaves if leaf is not Tensor]
    return is_plain and all(x.is_meta for x in tensors) and all(isinstance(leaf, PLAIN) for leaf in others)


class _Place(NamedTuple):
    """How a tensor lies in memory, and in which.

    Attributes:
        storage: its number: of those that are given first, then of new ones.
        nbytes: of the storage.
        size: of the tensor, as its other attributes.
    """

    storage: int
    nbytes: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool


class _Known(NamedTuple):
    """What a call makes: places of outputs, of what is kept, and what it returns without its tensors."""

    outputs: tuple[_Place, ...]
    kept: tuple[_Place, ...]
    result: _Mold


class _KnownCall:
    """As `_Call`, and another in the same forms may have gone through already."""

    result: _Mold

    def __init__(self, function: Callable[..., Any], mold: _Mold, tensors: Sequence[Tensor]) -> None:
        self._key = function, mold, _places_of(tensors)

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """As `_Call.forward`."""
        known = _forward(*self._key)
        self.result = known.result
        outputs = _laid(known.outputs, tensors)
        return tuple(outputs), _laid(known.kept, [*tensors, *outputs])

    def backward(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """As `_Call.backward`."""
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
    """Where tensors lie, some of them maybe in the memory of others that are given."""
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
    """Meta tensors in these places: views of those that are given, and new ones."""
    storages = [x.untyped_storage() for x in _by_storage(given).values()]
    made = []
    for place in places:
        while place.storage >= len(storages):  # numbered in the order in which they are met
            storages.append(torch.empty(place.nbytes, dtype=torch.uint8, device="meta").untyped_storage())
        x = torch.empty(0, dtype=place.dtype, device="meta")
        x.set_(storages[place.storage], place.offset, place.size, place.stride)
        made.append(x.requires_grad_(place.requires_grad))
    return made
