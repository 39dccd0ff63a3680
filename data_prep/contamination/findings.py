"""Files of the test n-grams found in training text, each with the first document that contains it."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
from datatrove.io import DataFolder, get_datafolder
from datatrove.pipeline.base import PipelineStep

from data_prep.contamination.arrays import load_array, load_json, open_array_writer, save_array, save_json
from data_prep.contamination.runs import RUNS, run_names

ALL_GRAMS = "all.npy"
FIRST_OWNERS = "first.npy"
SUMMARY = "summary.json"
MAX_PENDING_GRAMS = 2_000_000
"""Number of found n-grams that a task keeps in memory before writing them (32 MB, and as much for sorting)."""

SEEN_CACHE_SIZE = 1 << 23
"""Number of entries in a task's cache of n-grams already found, which avoids writing them repeatedly (64 MB)."""

MERGE_BLOCK_GRAMS = 8_000_000
"""Number of n-grams whose first documents are compared at once (160 MB)."""

FOUND = np.dtype([("gram", "<i8"), ("document", "<u8")])
"""Index of an n-gram in the array of all n-grams, and a document that contains it.

A document is encoded as (index of its source among the task's sources) * 2**32 + (index of the document in the source).
"""

OWNER = np.dtype([("document", "<u8"), ("task", "<u4")])
"""First document that contains an n-gram (encoded as in `FOUND`), and the task that read the document."""

NOT_FOUND = np.uint64(2**64 - 1)

_SOURCE_SHIFT = np.uint64(32)
_INDEX_MASK = np.uint64(2**32 - 1)


class FindingsWriter:
    """Writer of the n-grams that a task finds, each with the first document that contains it, as runs sorted by n-gram.

    An n-gram occurs at most once in a run. It may occur in several runs, because the cache of n-grams already found is
    direct-mapped: an n-gram evicts another n-gram with the same cache index.
    """

    def __init__(self, folder: DataFolder, rank: int, grams: int) -> None:
        self._folder = folder
        self._prefix = f"{RUNS}/{rank:05d}"
        self._runs = 0
        self._seen = np.full(max(1, min(grams, SEEN_CACHE_SIZE)), -1, np.int64)
        self._grams, self._documents = array("q"), array("Q")

    def add(self, hits: npt.NDArray[np.int64], document: int) -> bool:
        """Add the distinct n-grams of a document. Return True if any of them may be new to the task."""
        slots = hits % len(self._seen)
        is_new = self._seen[slots] != hits
        new = hits[is_new]
        self._seen[slots[is_new]] = new
        self._grams.frombytes(new.tobytes())
        self._documents.extend([document] * len(new))
        if len(self._grams) >= MAX_PENDING_GRAMS:
            self.close()
        return len(new) > 0

    def close(self) -> None:
        """Write the pending n-grams, or an empty run to show that the task found nothing."""
        rows = np.empty(len(self._grams), FOUND)
        rows["gram"], rows["document"] = self._grams, self._documents
        _, first = np.unique(rows["gram"], return_index=True)
        save_array(self._folder, f"{self._prefix}-{self._runs:05d}.npy", rows[first])
        self._grams, self._documents, self._runs = array("q"), array("Q"), self._runs + 1


class MergeFindings(PipelineStep):
    """Step that merges the tasks' findings: ascending n-grams, and the first training document that contains each.

    Documents are ordered by source, then by position in the source. The result is independent of the number of tasks if
    each task reads its sources completely. The step runs in one task.
    """

    type = "DECONTAMINATION"
    name = "merge findings"

    def __init__(self, grams: str, found: str, tasks: int) -> None:
        super().__init__()
        self.grams = get_datafolder(grams)
        self.found = get_datafolder(found)
        self.tasks = tasks

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Merge the findings of all tasks."""
        grams = load_array(self.grams, ALL_GRAMS)
        runs = run_names(self.found, RUNS, self.tasks)
        summaries = [load_json(self.found, f"{task:05d}.json") for task in range(self.tasks)]
        ranks = _source_ranks([summary["sources"] for summary in summaries])
        with (
            open_array_writer(self.found, ALL_GRAMS, np.uint64) as add_grams,
            open_array_writer(self.found, FIRST_OWNERS, OWNER) as add_owners,
        ):
            for start in range(0, len(grams), MERGE_BLOCK_GRAMS):
                part = grams[start : start + MERGE_BLOCK_GRAMS]
                owners = self._first_owners(runs, ranks, start, len(part))
                found = owners["document"] != NOT_FOUND
                add_grams(part[found])
                add_owners(owners[found])
                self.stat_update("ngrams", value=int(found.sum()))
        counts = sum((Counter(summary["counts"]) for summary in summaries), Counter())
        save_json(self.found, SUMMARY, {name: counts[name] for name in ("documents", "overlapping")})

    def _first_owners(
        self, runs: list[list[str]], ranks: list[npt.NDArray[np.uint64]], start: int, count: int
    ) -> npt.NDArray[np.void]:
        """Return the first document (`OWNER`) of each of `count` n-grams, from index `start` on; shape (count,)."""
        first = np.zeros(count, OWNER)
        first["document"] = NOT_FOUND
        order = first["document"].copy()
        for task, task_runs in enumerate(runs):
            for run in task_runs:
                rows = load_array(self.found, run)
                low, high = np.searchsorted(rows["gram"], [start, start + count])
                indices, documents = rows["gram"][low:high] - start, rows["document"][low:high]
                orders = (ranks[task][documents >> _SOURCE_SHIFT] << _SOURCE_SHIFT) + (documents & _INDEX_MASK)
                earlier = orders < order[indices]  # an index occurs once per run
                order[indices[earlier]] = orders[earlier]
                first["document"][indices[earlier]] = documents[earlier]
                first["task"][indices[earlier]] = task
        return first


def _source_ranks(sources: list[list[str]]) -> list[npt.NDArray[np.uint64]]:
    """Return for each task the positions of its sources in the sorted list of all sources."""
    order = {source: rank for rank, source in enumerate(sorted(set().union(*sources)))}
    return [np.array([order[source] for source in task_sources], np.uint64) for task_sources in sources]


def names_file(rank: int) -> str:
    """Return the name of a search task's file with one JSON line per document: [document, source, id].

    The document is encoded as in `FOUND`.
    """
    return f"{rank:05d}.jsonl"
