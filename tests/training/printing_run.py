"""Function run by each rank: a run whose messages are returned."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path

import whole_run


def start_again(rank: int, world_size: int, path: Path, overrides: list[str]) -> str:
    """Train as `selectron train --resume=auto` does. Return the rank's standard error."""
    with redirect_stderr(io.StringIO()) as errors:
        whole_run.run(rank, world_size, path, overrides, resume="auto")
    return errors.getvalue()
