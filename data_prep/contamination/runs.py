"""Sorted runs of hashes. A task writes a run whenever its buffer is full. A merge then processes range by range.

The hashes are never all in memory. A run and a range have at most about `RUN_HASHES` hashes, each of which takes about
32 bytes during sorting. Hashes are uniformly distributed, so that ranges of equal width have about equally many hashes.
"""

from __future__ import annotations

import numpy as np
from datatrove.io import DataFolder

from data_prep.contamination.arrays import load_array, open_array_writer, save_array
from data_prep.contamination.ngrams import Hashes

RUNS = "runs"
"""Name of the folder of runs."""

RUN_HASHES = 8_000_000
"""Number of hashes that are sorted at once, in 256 MB."""


class RunWriter:
    """Writer of a task's hashes to `<name>/<task>-<run>.npy`, each run ascending and without repetition.

    Args:
        folder: output folder.
        name: subfolder of the runs.
        rank: index of the task.
    """

    def __init__(self, folder: DataFolder, name: str, rank: int) -> None:
        self._folder = folder
        self._prefix = f"{name}/{rank:05d}"
        self._pending: list[Hashes] = []
        self._num_pending = 0
        self._runs = 0

    def add(self, hashes: Hashes) -> None:
        """Add hashes in any order."""
        self._pending.append(hashes)
        self._num_pending += len(hashes)
        if self._num_pending >= RUN_HASHES:
            self.close()

    def close(self) -> None:
        """Write the pending hashes as a run. The run may be empty, because the merge requires a run of every task."""
        hashes = np.unique(np.concatenate([np.empty(0, np.uint64), *self._pending]))
        save_array(self._folder, f"{self._prefix}-{self._runs:05d}.npy", hashes)
        self._pending, self._num_pending, self._runs = [], 0, self._runs + 1


def merge_runs(source: DataFolder, name: str, tasks: int, target: DataFolder, merged: str) -> int:
    """Merge all runs into one ascending array without repetition.

    Args:
        source: folder of the runs.
        name: subfolder of the runs.
        tasks: number of tasks that wrote runs.
        target: folder of the array.
        merged: name of the array.

    Returns:
        Number of hashes in the array.
    """
    runs = [run for task_runs in run_names(source, name, tasks) for run in task_runs]
    ranges = 1 + sum(len(load_array(source, run)) for run in runs) // RUN_HASHES
    count = 0
    with open_array_writer(target, merged, np.uint64) as append:
        for index in range(ranges):
            bounds = [np.uint64((edge << 64) // ranges) for edge in (index, index + 1) if edge < ranges]
            parts = [_copy_range(load_array(source, run), bounds) for run in runs]
            hashes = np.unique(np.concatenate([np.empty(0, np.uint64), *parts]))
            append(hashes)
            count += len(hashes)
    return count


def run_names(folder: DataFolder, name: str, tasks: int) -> list[list[str]]:
    """Return the names of each task's runs, in order.

    Raises:
        FileNotFoundError: a task has written no run.
    """
    names: list[list[str]] = [[] for _ in range(tasks)]
    for run in sorted(folder.list_files(name, glob_pattern="*.npy")):
        names[int(run.rsplit("/", 1)[-1].split("-")[0])].append(run)
    for task, runs in enumerate(names):
        if not runs:
            raise FileNotFoundError(f"{folder.path}/{name}: no runs of task {task}")
    return names


def _copy_range(ascending: Hashes, bounds: list[np.uint64]) -> Hashes:
    """Return a copy of the values in [first bound, second bound). Without a second bound there is no upper limit."""
    start, *end = np.searchsorted(ascending, bounds)
    return np.array(ascending[start : end[0] if end else None])
