"""Work around the ops, element by element, as few kernels on a GPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from kernels.one_kernel import as_one_kernel

P = ParamSpec("P")
R = TypeVar("R")

MOST_FORMS = 64
"""Of one function, compiled for what it is called with."""

OWN_SHAPES = 16
"""Of its first argument, that a function has code of its own for; later ones share code for any."""

_varying: ContextVar[bool] = ContextVar("shapes vary", default=False)


@contextmanager
def shapes_vary(vary: bool = True) -> Iterator[None]:
    """Within, shapes are ever new: a function is compiled for any length that was seen to differ, from the second on.

    Else it has code of its own for each of the first OWN_SHAPES, which is fast and soon made where a run has few. The
    lengths and numbers of packed documents differ within every batch: a compiler would take minutes for a first step.

    Args:
        vary: False for what this was before.
    """
    before = _varying.set(vary)
    try:
        yield
    finally:
        _varying.reset(before)


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: `torch.compile` on a GPU, the function as it is elsewhere.

    For sums, products and norms of a few numbers, whose time is that of reading and writing them: each of torch's own
    kernels would read and write them again. Set TORCH_COMPILE_DISABLE=1 to do without.

    Args:
        function: its first argument is a tensor.
    """
    plain: Callable[..., R] = function

    def laid(orders: tuple[tuple[int, ...] | None, ...], *args: Any, **more: Any) -> R:
        # What is compiled leaves a gradient as it was computed, which an op or a linear before would copy.
        return plain(
            *(x if o is None else _LaidGradient.apply(x, o) for x, o in zip(args, orders, strict=True)), **more
        )

    # Else it would be one for all functions to torch, which allows each so many forms.
    laid.__code__ = laid.__code__.replace(co_name=function.__name__)

    @wraps(function)
    def call(*args: P.args, **more: P.kwargs) -> R:
        x = args[0]
        assert isinstance(x, torch.Tensor)
        if x.is_meta:
            kept: R = as_one_kernel(function, *args, **more)
            return kept
        if not _runs_compiled(x):
            return function(*args, **more)
        # Sorted out here: code for any length cannot tell which of two strides is the greater.
        orders = tuple(_outermost_first(x) if isinstance(x, torch.Tensor) and x.requires_grad else None for x in args)
        result: R = compiled(laid, x, later=True)(orders, *args, **more)
        return result

    return call


def _runs_compiled(x: torch.Tensor) -> bool:
    return x.is_cuda and not torch.compiler.is_compiling()


def _outermost_first(x: torch.Tensor) -> tuple[int, ...]:
    """Dimensions of x in the order that they have in memory."""
    return tuple(sorted(range(x.dim()), key=x.stride, reverse=True))


class _LaidGradient(torch.autograd.Function):
    """x, whose gradient is to have its dimensions in memory in an order, outermost first, without gaps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        ctx.outermost_first = order
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        order = ctx.outermost_first
        return grad.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))]), None


def cut(x: torch.Tensor, widths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Views of x, cut along its last dimension; on a GPU, their gradients are put together in one pass.

    Args:
        x: [..., width]; what is behind the views is padding.
        widths: of the views.
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
            return _joined(*grads, padding=ctx.padding), None


@fused
def _joined(*parts: torch.Tensor, padding: int) -> torch.Tensor:
    return torch.cat([*parts, parts[0].new_zeros(*parts[0].shape[:-1], padding)], -1)


def compiled(function: Any, x: torch.Tensor, *, later: bool | None, fullgraph: bool = False) -> Any:
    """`torch.compile` on a GPU of a function that a process may call in many shapes, dtypes and settings.

    Left to itself, torch compiles for any shape from the second on, and code for heads of any width is slow, or cannot
    be made.

    Args:
        function: to be compiled at its first call.
        x: its first argument, for the shape; elsewhere than on a GPU, the function is left as it is.
        later: for shapes after the first OWN_SHAPES, whether one code serves any; None: any of those lengths that
            were seen to differ. Within `shapes_vary` it is None from the first on.
        fullgraph: raise where it cannot be compiled as one graph.
    """
    if x.is_meta:
        return partial(as_one_kernel, function)
    if not _runs_compiled(x):
        return function
    if _varying.get():
        return _compiled(function, fullgraph, None)
    shapes = _shapes_of(function)
    if len(shapes) < OWN_SHAPES:
        shapes.add(x.shape)
    return _compiled(function, fullgraph, False if x.shape in shapes else later)


@cache
def _shapes_of(function: Any) -> set[torch.Size]:
    return set()


@cache
def _compiled(function: Any, fullgraph: bool, dynamic: bool | None) -> Any:
    from torch._dynamo import config  # torch.compile imports for seconds: at the first call, not before

    # A function serves every mixer, and flex_attention every window. After 8 forms torch would take the plain one.
    config.recompile_limit = max(config.recompile_limit, MOST_FORMS)
    return torch.compile(function, fullgraph=fullgraph, dynamic=dynamic)
