"""What tasks have done so far, told through a small file and shown on standard error."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

INTERVAL_SECONDS = 0.5


class Board:
    """Two numbers a task, input bytes read and tokens written, in a file that every process maps.

    Works wherever the tasks run, on one machine or on several with a shared file system: a task writes its own row
    alone.

    Args:
        path: the file.
        tasks: number of rows.
    """

    def __init__(self, path: Path, tasks: int) -> None:
        self.path = path
        self.tasks = tasks

    def clear_missing(self) -> None:
        """Make the file where there is none; what finished tasks wrote before a stop stays."""
        if not self.path.exists():
            self.path.write_bytes(bytes(16 * self.tasks))

    def bytes_of(self, task: int) -> np.ndarray:
        """The bytes that a task has read: an array of one writable number, set to 0."""
        return self._zeroed(task, 0)

    def tokens_of(self, task: int) -> np.ndarray:
        """The tokens that a task has written: an array of one writable number, set to 0."""
        return self._zeroed(task, 1)

    def sums(self) -> tuple[int, int]:
        """Bytes and tokens of all tasks."""
        read, tokens = self._map("r").sum(axis=0)
        return int(read), int(tokens)

    def _zeroed(self, task: int, column: int) -> np.ndarray:
        cell = self._map("r+")[task, column : column + 1]
        cell[:] = 0
        return cell

    def _map(self, mode: str) -> np.ndarray:
        return np.memmap(self.path, np.int64, mode, shape=(self.tasks, 2))  # type: ignore[call-overload]


@contextlib.contextmanager
def shown(board: Board, title: str, total_bytes: int, *, visible: bool) -> Iterator[None]:
    """Show a board on standard error while the block runs.

    The bar is over the bytes of the input: they alone are known beforehand, and give the time left.
    """
    if not visible:
        yield
        return
    done = threading.Event()
    read, tokens = board.sums()
    with tqdm(total=total_bytes, initial=read, desc=title, unit="B", unit_scale=True) as bar:
        thread = threading.Thread(target=_follow, args=(board, bar, tokens, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _follow(board: Board, bar: tqdm, before: int, done: threading.Event) -> None:
    finished = False
    while not finished:
        finished = done.wait(INTERVAL_SECONDS)
        read, tokens = board.sums()
        seconds = bar.format_dict["elapsed"]
        if tokens and seconds:
            speed = tqdm.format_sizeof(max(tokens - before, 0) / seconds)
            bar.set_postfix_str(f"{tqdm.format_sizeof(tokens)} tokens, {speed} tokens/s", refresh=False)
        bar.n = read
        bar.refresh()
