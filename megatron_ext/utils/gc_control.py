"""Exclusion of imported modules from garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_is_ours = False


def process_is_ours(is_ours: bool) -> None:
    """Set whether the command is all that this process does. If so, objects of imports are never collected."""
    global _is_ours
    _is_ours = is_ours


@contextmanager
def unlooked_for() -> Iterator[None]:
    """Context manager around imports of torch and Megatron, whose million objects live until the process ends.

    Garbage collections during these imports and at exit take a quarter of the time of a short run. Objects are frozen
    only if the process is ours, as a caller's objects would be frozen, too.
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _is_ours:
            gc.freeze()
        if is_collecting:
            gc.enable()
