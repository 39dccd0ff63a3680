"""Function run by each rank: a run whose last rank waits for its samples."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

import whole_run

from megatron_ext.data.datasets import step_batches


def run(rank: int, world_size: int, path: Path, overrides: list[str], seconds: float) -> str:
    """Train, with the last rank's samples delayed by `seconds`. Return the rank's standard error."""

    def late(*arguments: Any, **named: Any) -> Any:
        if rank == world_size - 1:
            time.sleep(seconds)
        return step_batches(*arguments, **named)

    with patch("megatron_ext.training.loop.step_batches", late), redirect_stderr(io.StringIO()) as errors:
        whole_run.run(rank, world_size, path, overrides)
    return errors.getvalue()
