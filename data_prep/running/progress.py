"""Progress of tasks, shared through a small file and shown on standard error."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

INTERVAL_SECONDS = 0.5


class ProgressBoard:
    """Input bytes read, tokens written and start time of each task, in a file that all processes memory-map.

    The board works on one machine, and on several machines with a shared file system, because a task only writes its
    own entries. The file contains int64 values: (bytes, tokens) of each task, then the start time of each task in ms
    since the epoch. The start times are at the end, so that a file of an earlier format without them can be extended.

    Args:
        path: the file.
        tasks: number of tasks.
    """

    def __init__(self, path: Path, tasks: int) -> None:
        self.path = path
        self.tasks = tasks

    def create(self) -> None:
        """Create the file, or extend it with zeros to its full size. Existing entries are kept."""
        size = self.path.stat().st_size if self.path.exists() else 0
        with self.path.open("ab") as file:  # written zeros instead of a hole, so that a full disk raises an error here
            file.write(bytes(max(0, 8 * 3 * self.tasks - size)))

    def byte_counter(self, task: int) -> np.ndarray:
        """Record the start of a task, and return its byte count: a writable int64 array of shape (1,), set to 0."""
        cell = self._reset_cell(task, 0)
        self._map("r+")[2 * self.tasks + task] = round(1000 * time.time())
        return cell

    def token_counter(self, task: int) -> np.ndarray:
        """Return the token count of a task: a writable int64 array of shape (1,), set to 0."""
        return self._reset_cell(task, 1)

    def sums(self) -> tuple[int, int]:
        """Return the total number of bytes and of tokens of all tasks."""
        read, tokens = self._counts(self._map("r")).sum(axis=0)
        return int(read), int(tokens)

    def progress(self, finished: Collection[int], now: float) -> Progress:
        """Return the progress and speed of the tasks.

        Args:
            finished: tasks that no longer run. Their progress counts, but not their speed.
            now: seconds since the epoch.
        """
        values = self._map("r").copy()
        counts, start_times = self._counts(values), values[2 * self.tasks :] / 1000
        is_running = start_times > 0
        is_running[list(finished)] = False
        seconds = np.maximum(now - start_times[is_running], 1.0)  # not negative, even if the clocks of machines differ
        speeds = (counts[is_running] / seconds[:, None]).sum(axis=0)
        read, tokens = counts.sum(axis=0)
        return Progress(int(read), int(tokens), int(is_running.sum()), float(speeds[0]), float(speeds[1]))

    def _reset_cell(self, task: int, column: int) -> np.ndarray:
        index = 2 * task + column
        cell = self._map("r+")[index : index + 1]
        cell[:] = 0
        return cell

    def _counts(self, values: np.ndarray) -> np.ndarray:
        return values[: 2 * self.tasks].reshape(self.tasks, 2)

    def _map(self, mode: str) -> np.ndarray:
        return np.memmap(self.path, np.int64, mode, shape=(3 * self.tasks,))  # type: ignore[call-overload]


@dataclass(frozen=True)
class Progress:
    """Progress and speed of a stage's tasks.

    Attributes:
        read: input bytes read by all tasks.
        tokens: tokens written by all tasks.
        num_running: number of running tasks.
        read_speed: input bytes per second of the running tasks.
        token_speed: tokens per second of the running tasks.
    """

    read: int
    tokens: int
    num_running: int
    read_speed: float
    token_speed: float

    def describe(self, total_bytes: int) -> str:
        """Describe the progress in words, with the remaining time for the input bytes that a stage reads."""
        words = [f"{100 * self.read / max(total_bytes, 1):.0f} % of {tqdm.format_sizeof(total_bytes)}B read"]
        if not self.num_running:
            return f"{words[0]}, no running task"
        words.append(f"{tqdm.format_sizeof(self.read_speed)}B/s")
        if self.tokens:
            words.append(f"{tqdm.format_sizeof(self.token_speed)} tokens/s")
        if self.read_speed:
            seconds_left = max(total_bytes - self.read, 0) / self.read_speed
            words.append(f"{tqdm.format_interval(seconds_left)} left in this stage")
        return ", ".join(words)


@contextlib.contextmanager
def show_progress(board: ProgressBoard, title: str, total_bytes: int, *, visible: bool) -> Iterator[None]:
    """Context manager that shows a board as a progress bar on standard error.

    The bar counts input bytes, because only their total is known in advance.
    """
    if not visible:
        yield
        return
    is_done = threading.Event()
    read, tokens = board.sums()
    # A minimal delay keeps tqdm from printing a first line of zeros; `_follow` shows the bar.
    with tqdm(total=total_bytes, initial=read, desc=title, unit="B", unit_scale=True, delay=1e-9) as bar:
        thread = threading.Thread(target=_follow, args=(board, bar, tokens, is_done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()


def _follow(board: ProgressBoard, bar: tqdm, initial_tokens: int, is_done: threading.Event) -> None:
    finished = False
    while not finished:
        finished = is_done.wait(INTERVAL_SECONDS)
        read, tokens = board.sums()
        seconds = bar.format_dict["elapsed"]
        if tokens and seconds:
            speed = tqdm.format_sizeof(max(tokens - initial_tokens, 0) / seconds)
            bar.set_postfix_str(f"{tqdm.format_sizeof(tokens)} tokens, {speed} tokens/s", refresh=False)
        bar.n = read
        bar.refresh()
