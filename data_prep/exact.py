"""Exact duplicates across tasks: the first copy in the input stays, whatever the number of tasks.

Three steps: every task writes 16 bytes a document, a hash and a place, sorted by hash; each bucket of hashes is then
searched on its own, and the places of later copies are written; tasks that read the documents again leave those out.
Memory is bounded by the size of a run and of a bucket, not by the input.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from data_prep.arrays import save_at
from data_prep.splits import fingerprint
from data_prep.steps import place_of
from data_prep.storage import locked

RUN_DOCUMENTS = 4_000_000
"""Documents of a task whose hashes are sorted in memory at a time (64 MB)."""

BUCKET_BYTES = 16 << 30
"""Input bytes a bucket: about 12 million documents of SlimPajama, compressed, or 200 MB of hashes."""

ROW = np.dtype([("hash", "<u8"), ("place", "<u8")])


def buckets_for(total_bytes: int) -> int:
    """Number of buckets for an input of this size."""
    return 1 + total_bytes // BUCKET_BYTES


class WriteFingerprints(PipelineStep):
    """Writes hash and place of every document of a task to `<folder>/<task>-<run>.npy`, sorted by hash."""

    type = "DEDUP"
    name = "fingerprints"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Consume the documents of a task."""
        with locked(self.folder / f"{rank:05d}.lock"):
            self._write_runs(data, rank)
        yield from ()

    def _write_runs(self, data: Iterator[Document], rank: int) -> None:
        rows = array("Q")
        run = 0
        for document in data:
            rows.extend((fingerprint(document.text), place_of(document)))
            if len(rows) == 2 * RUN_DOCUMENTS:
                self._write(rank, run, rows)
                run, rows = run + 1, array("Q")
        self._write(rank, run, rows)

    def _write(self, rank: int, run: int, rows: array[int]) -> None:
        table = np.frombuffer(rows.tobytes(), ROW)
        save_at(self.folder / f"{rank:05d}-{run:03d}.npy", table[np.argsort(table["hash"], kind="stable")])


class FindDuplicates(PipelineStep):
    """Searches one bucket of hashes a task; writes the sorted places of later copies to `<folder>/<bucket>.npy`."""

    type = "DEDUP"
    name = "exact duplicates"

    def __init__(self, fingerprints: Path, folder: Path) -> None:
        super().__init__()
        self.fingerprints = fingerprints
        self.folder = folder

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Search a bucket; there are `world_size` of them."""
        with locked(self.folder / f"{rank:05d}.lock"):
            save_at(self.folder / f"{rank:05d}.npy", self._later_copies(rank, world_size))
        yield from ()

    def _later_copies(self, rank: int, world_size: int) -> npt.NDArray[np.uint64]:
        bounds = [np.uint64((bucket << 64) // world_size) for bucket in (rank, rank + 1) if bucket < world_size]
        parts = []
        for path in sorted(self.fingerprints.glob("*.npy")):
            table = np.load(path, mmap_mode="r")
            start, *end = np.searchsorted(table["hash"], bounds)
            parts.append(np.array(table[start : end[0] if end else None]))
        rows = np.concatenate(parts)
        rows = rows[np.lexsort((rows["place"], rows["hash"]))]
        return np.sort(rows["place"][1:][rows["hash"][1:] == rows["hash"][:-1]])


class DropDuplicates(PipelineStep):
    """Leaves out the documents whose places `FindDuplicates` wrote, and counts them in `dropped`."""

    type = "DEDUP"
    name = "drop duplicates"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.dropped = 0

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents that stay."""
        tables = [np.load(path, mmap_mode="r") for path in sorted(self.folder.glob("*.npy"))]
        unit, dropped = -1, frozenset[int]()
        for document in data:
            if document.metadata["unit"] != unit:
                unit = document.metadata["unit"]
                dropped = _numbers_of(unit, tables)
            if document.metadata["number"] in dropped:
                self.dropped += 1
            else:
                yield document


def _numbers_of(unit: int, tables: list[npt.NDArray[np.uint64]]) -> frozenset[int]:
    bounds = np.array([unit, unit + 1], np.uint64) << np.uint64(32)
    found = [table[slice(*np.searchsorted(table, bounds))] & np.uint64(0xFFFFFFFF) for table in tables]
    return frozenset(np.concatenate(found).tolist())
