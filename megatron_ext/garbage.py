"""What a command imports is not looked through for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_is_ours = False


def process_is_ours(is_ours: bool) -> None:
    """Say whether the command is all that this process does: what has been imported then is never looked through."""
    global _is_ours
    _is_ours = is_ours


@contextmanager
def unlooked_for() -> Iterator[None]:
    """Around imports of torch and Megatron, whose million objects stay until the process ends.

    Looking through them for garbage, again and again while they become more, and once more at the end, takes a quarter
    of the time of a short run. Where a caller has other objects, those must not stay with them.
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
