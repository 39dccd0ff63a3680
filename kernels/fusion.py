"""Work around the ops, element by element, as few kernels on a GPU."""

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


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
        run = _compiled(function) if _runs_compiled(x) else function
        return run(*args, **more)

    return call


def _runs_compiled(x: torch.Tensor) -> bool:
    return x.is_cuda and not torch.compiler.is_compiling()


# At the first call: torch.compile imports for seconds.
_compiled = cache(torch.compile)
