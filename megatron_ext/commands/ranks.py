"""Processes of the commands that run as the ranks of a process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from megatron_ext.utils.errors import UserError


def world_size(requested: int | None) -> int | None:
    """Return the number of processes of the run: from torchrun's environment, or as requested.

    Raises:
        UserError: the requested number is below 1 or differs from the number of started processes.
    """
    if requested is not None and requested < 1:
        raise UserError("--processes", f"{requested} is less than 1", "give 1 or more")
    if "RANK" not in os.environ:
        return requested
    num_started = int(os.environ.get("WORLD_SIZE", "1"))
    if requested is not None and requested != num_started:
        raise UserError(
            "--processes",
            f"{requested} differs from the {num_started} that the launcher has started",
            "omit the option",
        )
    return num_started


def run_as_ranks(verb: str, arguments: Sequence[str], processes: int | None, work: Callable[[], int | None]) -> int:
    """Run a rank's work: here if this process is a rank or the only one, else in as many processes as requested.

    Args:
        verb: name of the command.
        arguments: arguments of the command, which each started process gets.
        processes: number of ranks; None: one, or as many as torchrun has started.
        work: function that each rank runs; returns an exit code, or None for 0.

    Returns:
        Exit code.
    """
    if "RANK" not in os.environ:
        from megatron_ext.launch import local

        if processes and processes > 1:
            return local.launch(local.rank_command(verb, arguments), processes)
        with local.single_rank_environment():
            return work() or 0
    return work() or 0
