"""Work around the ops, element by element, as few kernels on a GPU."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

MOST_FORMS = 64
"""Of one function, compiled for what it is called with."""


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: `torch.compile` on a GPU, the function as it is elsewhere.

    For sums, products and norms of a few numbers, whose time is that of reading and writing them: each of torch's own
    kernels would read and write them again. Set TORCH_COMPILE_DISABLE=1 to do without.

    Args:
        function: its first argument is a tensor.
    """

    @wraps(function)
    def call(*args: P.args, **more: P.kwargs) -> R:
        x = args[0]
        assert isinstance(x, torch.Tensor)
        run = compiled(function) if _runs_compiled(x) else function
        return run(*args, **more)

    return call


def _runs_compiled(x: torch.Tensor) -> bool:
    return x.is_cuda and not torch.compiler.is_compiling()


@cache
def compiled(function: Any, *, fullgraph: bool = False) -> Any:
    """`torch.compile` of a function that a process may call in many shapes, dtypes and settings.

    Args:
        function: to be compiled at its first call.
        fullgraph: raise where it cannot be compiled as one graph.
    """
    from torch._dynamo import config  # torch.compile imports for seconds: at the first call, not before

    # A function serves every mixer, and flex_attention every window. After 8 forms torch would take the plain one.
    config.recompile_limit = max(config.recompile_limit, MOST_FORMS)
    return torch.compile(function, fullgraph=fullgraph)
