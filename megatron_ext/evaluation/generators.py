"""Generators of random numbers, kept from what happens between two steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def generators_kept() -> Iterator[None]:
    """After it the generators of this process (Python's, NumPy's, torch's, the device's) are what they were before."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
