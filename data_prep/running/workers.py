"""What holds wherever tasks run: datatrove's own messages are not shown, a process has one thread, files enough."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from datatrove.utils.logging import logger

from megatron_ext.errors import UserError

OWN_FILES = 100
"""Files that a process may hold open beside those of its task: libraries, logs, the forkserver's pipes."""


@contextmanager
def quiet() -> Iterator[None]:
    """Within it datatrove says nothing in this process."""
    logger.disable("datatrove")
    try:
        yield
    finally:
        logger.enable("datatrove")


def in_worker() -> None:
    """Do without datatrove's messages and with one thread: call in the process itself."""
    logger.disable("datatrove")
    # As many processes as cores: threads of the tokenizer library would only be in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"


def allow_open_files(tasks: int) -> None:
    """Let this process, and those that it starts, open a file of each task at once.

    Most systems allow 1,024 files, and more to a process that asks for them.

    Raises:
        UserError: the system does not allow as many.
    """
    wanted, (allowed, most) = tasks + OWN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY or wanted <= allowed:
        return
    if most != resource.RLIM_INFINITY and wanted > most:
        problem = f"files of all {tasks:,} tasks are open at once, and a process may open {most:,} here (ulimit -Hn)"
        raise UserError("--tasks", problem, f"give {max(1, most - OWN_FILES):,} at most, or raise the limit")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
