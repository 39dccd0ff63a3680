"""Ops on meta tensors: what they would keep and return on a GPU, without one and without memory.

A step is planned with them (`selectron plan`). The ops take their forms for a GPU, as `dispatch.on_gpu` says. Inside
`unlaunched` Triton's kernels are left out: all that a form does is to allocate, and to keep for its backward pass. What
is compiled on a GPU is one kernel to memory: `as_one_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from kernels.dispatch import HAS_TRITON

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


@contextmanager
def unlaunched() -> Iterator[None]:
    """Leave Triton's kernels out, of ours and of others: their outputs stay as they were allocated.

    Nothing is compiled, and FlexAttention takes meta tensors, which by itself it does not.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(patch.object(flex_attention, "_validate_device", _do_nothing))
        stack.enter_context(patch.object(flex_attention, "flex_attention_hop", _attention_of_any_mask))
        if HAS_TRITON:
            from triton.runtime.jit import KernelInterface

            stack.enter_context(patch.object(KernelInterface, "__getitem__", lambda self, grid: _do_nothing))
        yield


def _do_nothing(*_: Any, **__: Any) -> None:
    """What a kernel does to meta tensors."""


def _attention_of_any_mask(q_bhtd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    """What FlexAttention's operator keeps and returns: outputs and logarithms, as any kernel of this kind."""
    out_bhtd, lse_bht, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q_bhtd, k_bhsd, v_bhsd)
    return out_bhtd, lse_bht, lse_bht


def as_one_kernel(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Call a function of meta tensors that is compiled on a GPU: what comes between its kernels takes no memory."""
    given = _Mold.of((args, more))
    results: list[_Mold] = []

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        again, more_again = given.filled(tensors)
        result = function(*again, **more_again)
        results[:] = [_Mold.of(result)]
        return _tensors_of(result)

    outputs = _OneKernel.apply(call, *_tensors_of((args, more)))
    return results[0].filled(outputs)


def _tensors_of(tree: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class _Mold(NamedTuple):
    """Nested tuples, lists and dictionaries without their tensors."""

    leaves: list[Any]
    spec: TreeSpec

    @classmethod
    def of(cls, tree: Any) -> _Mold:
        """What is left of them."""
        leaves, spec = tree_flatten(tree)
        return cls([Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """They, with tensors in their places."""
        rest = iter(tensors)
        return tree_unflatten([next(rest) if leaf is Tensor else leaf for leaf in self.leaves], self.spec)


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


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.call, ctx.forms = call, [_form_of(x) for x in tensors]
        saved: list[Tensor] = []
        with one_kernel():
            inputs = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(partial(_noted, saved), lambda x: x):
                outputs = tuple(x.detach() for x in call(*inputs))
            ctx.save_for_backward(*_kept(saved, inputs))
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with one_kernel(), torch.enable_grad():
            inputs = [form.made() for form in ctx.forms]
            learned = [(x, grad) for x, grad in zip(ctx.call(*inputs), grads, strict=True) if x.requires_grad]
            wanted = [x for x in inputs if x.requires_grad]
            outputs, theirs = [x for x, _ in learned], [grad for _, grad in learned]
            found = iter(torch.autograd.grad(outputs, wanted, theirs, allow_unused=True))
        return None, *(next(found) if x.requires_grad else None for x in inputs)


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
