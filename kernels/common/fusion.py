"""Compilation of the element-wise work around the ops, to launch few GPU kernels."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from kernels.meta.fused_call import as_one_kernel

P = ParamSpec("P")
R = TypeVar("R")

MAX_VARIANTS = 64
"""Maximum compiled variants of a function (`recompile_limit`). For more, torch falls back to eager mode."""

NUM_STATIC_SHAPES = 16
"""Number of shapes of the first argument that are compiled statically. Later shapes may share dynamic code."""

_varying: ContextVar[bool] = ContextVar("shapes vary", default=False)


@contextmanager
def shapes_vary(vary: bool = True) -> Iterator[None]:
    """Context manager for inputs whose shapes keep changing: compile dynamically from the second shape on.

    Outside this context, a function is compiled statically for each of its first `NUM_STATIC_SHAPES` shapes. Static
    code is faster, and a run with few shapes compiles quickly. With packed documents, however, every batch has other
    shapes, and static compilation would take minutes.

    Args:
        vary: False to compile statically even inside an outer `shapes_vary()`.
    """
    before = _varying.set(vary)
    try:
        yield
    finally:
        _varying.reset(before)


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator that runs a function under `torch.compile` on a GPU and unchanged elsewhere.

    Use it for memory-bound element-wise operations and norms, for which each eager kernel would read and write the data
    once more. On meta tensors the call counts as one kernel. TORCH_COMPILE_DISABLE=1 disables compilation.

    Args:
        function: function whose first argument is a tensor.
    """
    plain: Callable[..., R] = function

    def with_gradient_layouts(orders: tuple[tuple[int, ...] | None, ...], *args: Any, **kwargs: Any) -> R:
        # Compiled code chooses the layout of a gradient. If that differs from the layout of x, the op or linear layer
        # that produced x would copy the gradient.
        return plain(
            *(x if order is None else _GradientLayout.apply(x, order) for x, order in zip(args, orders, strict=True)),
            **kwargs,
        )

    # torch limits recompilations per code object. Without this copy, all functions would share one limit.
    with_gradient_layouts.__code__ = with_gradient_layouts.__code__.replace(co_name=function.__name__)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        x = args[0]
        assert isinstance(x, torch.Tensor)
        if x.is_meta:
            meta_result: R = as_one_kernel(function, *args, **kwargs)
            return meta_result
        if not _runs_compiled(x):
            return function(*args, **kwargs)
        # Computed outside the compiled code, which cannot compare strides with dynamic shapes.
        orders = tuple(_outermost_first(x) if isinstance(x, torch.Tensor) and x.requires_grad else None for x in args)
        result: R = compiled(with_gradient_layouts, x, later_dynamic=True)(orders, *args, **kwargs)
        return result

    return call


def _runs_compiled(x: torch.Tensor) -> bool:
    return x.is_cuda and not torch.compiler.is_compiling()


def _outermost_first(x: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of x from the largest stride to the smallest."""
    return tuple(sorted(range(x.dim()), key=x.stride, reverse=True))


class _GradientLayout(torch.autograd.Function):
    """Identity whose gradient is made contiguous in a given order of dimensions, outermost first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        ctx.outermost_first = order
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        order = ctx.outermost_first
        return grad.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))]), None


def cut(x: torch.Tensor, widths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Split x into views along its last dimension. On a GPU, one kernel concatenates the gradients of the views.

    Args:
        x: [..., width]; features after the views are padding.
        widths: widths of the views.
    """
    if (_runs_compiled(x) or x.is_meta) and x.requires_grad and torch.is_grad_enabled():
        views: tuple[torch.Tensor, ...] = _Cut.apply(x, widths)
        return views
    return _views(x, widths)


def _views(x: torch.Tensor, widths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    return x.narrow(-1, 0, sum(widths)).split(list(widths), -1)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, widths: Sequence[int]) -> tuple[torch.Tensor, ...]:
        ctx.padding, ctx.shapes_vary = x.shape[-1] - sum(widths), _varying.get()
        return _views(x, widths)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        with shapes_vary(ctx.shapes_vary):
            return _concatenate(*grads, padding=ctx.padding), None


@fused
def _concatenate(*parts: torch.Tensor, padding: int) -> torch.Tensor:
    return torch.cat([*parts, parts[0].new_zeros(*parts[0].shape[:-1], padding)], -1)


def compiled(function: Any, x: torch.Tensor, *, later_dynamic: bool | None, fullgraph: bool = False) -> Any:
    """Compile a function that a process may call with many shapes, dtypes and settings.

    By default, torch compiles with dynamic shapes from the second shape on. Dynamic code for an arbitrary head width is
    slow, or fails to compile.

    Args:
        function: function to compile at its first call.
        x: first argument of the function. Its shape selects static or dynamic code. On a CPU, and inside another
            compilation, the function is returned unchanged. On the meta device, the call counts as one kernel.
        later_dynamic: `dynamic` argument of `torch.compile` for shapes after the first `NUM_STATIC_SHAPES`. True
            compiles one code for all shapes, None makes dimensions dynamic as they vary. Within `shapes_vary`, None is
            always used.
        fullgraph: True to raise an error if the function does not compile to a single graph.
    """
    if x.is_meta:
        return partial(as_one_kernel, function)
    if not _runs_compiled(x):
        return function
    if _varying.get():
        return _compiled(function, fullgraph, None)
    shapes = _shapes_of(function)
    if len(shapes) < NUM_STATIC_SHAPES:
        shapes.add(x.shape)
    return _compiled(function, fullgraph, False if x.shape in shapes else later_dynamic)


@cache
def _shapes_of(function: Any) -> set[torch.Size]:
    return set()


@cache
def _compiled(function: Any, fullgraph: bool, dynamic: bool | None) -> Any:
    from torch._dynamo import config  # importing torch.compile takes seconds, so only at the first call

    # One function serves every mixer, and flex_attention every window. After 8 variants torch would fall back to eager.
    config.recompile_limit = max(config.recompile_limit, MAX_VARIANTS)
    return torch.compile(function, fullgraph=fullgraph, dynamic=dynamic)
