"""Function that each rank runs: the command `selectron preflight`."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any
from unittest.mock import patch

from megatron_ext.cli import main
from megatron_ext.launch.preflight.board import Board


def preflight(rank: int, world_size: int, port: int, options: list[str], silent: tuple[int, ...]) -> tuple[int, str]:
    """Run the command as one of two processes per node, with the environment of a Slurm job that does not exist.

    Args:
        rank: global rank.
        world_size: number of ranks.
        port: free port of this machine.
        options: arguments of the command.
        silent: ranks that do not run the command. The first rank waits only a moment for their reports.

    Returns:
        Exit code and output.
    """
    if rank in silent:
        return 0, ""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SLURM_JOB_ID": "1"}
    environment |= {"SLURMD_NODENAME": f"n{rank // 2 + 1}", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
    printed, wait_for = io.StringIO(), Board.wait_for

    def wait_less(board: Board, key: str, seconds: float) -> Any:
        return wait_for(board, key, 0.1 if key in {f"report/{other}" for other in silent} else seconds)

    impatient = patch.object(Board, "wait_for", wait_less)
    with (
        impatient,
        patch.dict(os.environ, environment),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        return main(["preflight", *options]), printed.getvalue()
