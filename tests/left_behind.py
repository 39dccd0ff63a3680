"""Release of models and process groups that in-process training leaves behind."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from types import FunctionType

HOOK = "DistributedDataParallel._make_backward_post_hook.<locals>.hook"

MANY_THREADS = 40
"""Number of threads above which a test process searches for groups. Two sets of Megatron's groups have more."""


def release_models() -> None:
    """Release unused models with their process groups.

    A hook of Megatron's DistributedDataParallel holds the model in its closure, and an autograd node holds the hook.
    Python's garbage collector does not see this cycle. Each gloo group has a thread that wakes 100 times a second, so
    a few dozen training runs in one process would occupy a whole core.
    """
    if "megatron.core.distributed" not in sys.modules:
        return
    # `isinstance` would raise for a dead weak proxy.
    hooks = [x for x in gc.get_objects() if type(x) is FunctionType and x.__qualname__ == HOOK]
    for cell in (cell for hook in hooks for cell in hook.__closure__ or ()):
        cell.cell_contents = None
    gc.collect()


def has_many_threads() -> bool:
    """Return True if this process has more threads than tests without process groups start."""
    return len(os.listdir("/proc/self/task")) > MANY_THREADS if Path("/proc/self/task").is_dir() else False
