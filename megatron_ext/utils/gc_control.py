"""Pauses of garbage collection, and exclusion of imported modules from it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_owns_process = False


def set_process_owned(is_owned: bool) -> None:
    """Record whether this process runs only the command. If it does, imported objects are never collected."""
    global _owns_process
    _owns_process = is_owned


@contextmanager
def no_collection() -> Iterator[None]:
    """Context manager around work that makes many objects and no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def paused_collection() -> Iterator[None]:
    """Context manager around imports of torch and Megatron, whose million objects live until the process ends.

    Garbage collections during these imports and at exit take a quarter of the time of a short run. Objects are frozen
    only in a process that runs only the command, because a caller's objects would be frozen, too.
    """
    with no_collection():
        try:
            yield
        finally:
            if _owns_process:
                gc.freeze()
