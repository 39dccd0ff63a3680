"""Control of Python's garbage collection: pauses, and imports whose objects are never collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_owns_process = False


def set_process_owned(is_owned: bool) -> None:
    """Record whether this process runs a single command and then ends, so that `frozen_imports` may freeze objects."""
    global _owns_process
    _owns_process = is_owned


@contextmanager
def paused() -> Iterator[None]:
    """Context manager without garbage collection, for work that creates many objects but no reference cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Context manager for imports of torch and Megatron: no collection runs in it, or visits their objects later.

    These imports create a million objects that live until the process ends. To visit them, during the imports and at
    exit, takes a quarter of the time of a short run. They are frozen only in a process that runs a single command,
    because `gc.freeze` exempts all existing objects, those of a caller included.
    """
    with paused():
        try:
            yield
        finally:
            if _owns_process:
                gc.freeze()
