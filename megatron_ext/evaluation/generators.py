"""Save and restore the states of the random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserve_random_states() -> Iterator[None]:
    """Context manager that restores the random generators of this process: Python, NumPy, torch and the device."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
