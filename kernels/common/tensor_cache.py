"""Caches of tensors that the layers of a model share, such as masks and tables of positions."""

from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar, cast

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_clear_functions: list[Callable[[], None]] = []


def cached_tensors(maxsize: int) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return a decorator like `functools.lru_cache`, for functions of modules whose results hold tensors.

    `clear_tensor_caches` empties the caches of all these functions.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        cached = lru_cache(maxsize)(function)
        _clear_functions.append(cached.cache_clear)
        return cast(Callable[Parameters, Result], cached)

    return decorate


def clear_tensor_caches() -> None:
    """Empty the caches of all functions with `cached_tensors`.

    For a process that runs several models, each of which must create its own tensors, or create them in another dtype.
    """
    for clear in _clear_functions:
        clear()
