"""What holds wherever tasks run: datatrove's own messages are not shown, and a process has one thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from datatrove.utils.logging import logger


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
