"""Process settings for all executors: no datatrove messages, one thread, enough open files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from datatrove.utils.logging import logger

from megatron_ext.utils.errors import UserError

RESERVED_FILES = 100
"""Number of files that a process may have open besides those of its task: libraries, logs, the forkserver's pipes."""


@contextmanager
def silence_datatrove() -> Iterator[None]:
    """Context manager that silences datatrove in this process."""
    logger.disable("datatrove")
    try:
        yield
    finally:
        logger.enable("datatrove")


def configure_worker() -> None:
    """Silence datatrove and use one thread. Call it in the worker process itself."""
    logger.disable("datatrove")
    # There are as many processes as cores, so threads of the tokenizer library would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"


def allow_open_files(tasks: int) -> None:
    """Raise the limit on open files, so that this process and its children can open a file of each task at once.

    Most systems allow 1,024 files by default, and allow a process to raise this limit.

    Raises:
        UserError: the hard limit is too low.
    """
    required, (soft, hard) = tasks + RESERVED_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or required <= soft:
        return
    if hard != resource.RLIM_INFINITY and required > hard:
        problem = f"the files of all {tasks:,} tasks are open at once, but the limit here is {hard:,} (ulimit -Hn)"
        raise UserError("--tasks", problem, f"give at most {max(1, hard - RESERVED_FILES):,}, or raise the limit")
    resource.setrlimit(resource.RLIMIT_NOFILE, (required, hard))
