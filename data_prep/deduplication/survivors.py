"""datatrove steps of deduplication that datatrove lacks: which document of a group of duplicates stays.

The rule: every document has a key, its split (test before validation before train) and then 62 bits of hash of its id;
a document goes if it is a duplicate, directly or by way of others, of one with a smaller key. Only documents of splits
that are as protected as its own or more are looked at on the way. So what stays of the test split does not depend on
validation or training documents, what stays of validation not on training ones, and no training document stays that
was found a duplicate of one of them. Two test documents that only a training document links both stay. As the key
is the document's own, neither the number of tasks nor of workers changes the result.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from datatrove.data import Document
from datatrove.io import DataFolder, get_datafolder
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.minhash import MinhashDedupFilter

from data_prep.contamination.ngrams import Hashes
from data_prep.ledger import CountLeftOut
from megatron_ext.errors import UserError

PROTECTED = ("test", "validation", "train")
"""Splits, those whose documents stay first."""

_SPLIT_BIT = 62


def key_of(document: Document) -> int:
    """The document's place among its duplicates, 64 bits: the one with the smallest key stays."""
    split = PROTECTED.index(document.metadata["split"])
    return split << _SPLIT_BIT | xxhash.xxh3_64_intdigest(document.id.encode()) >> (64 - _SPLIT_BIT)


class WriteKeys(PipelineStep):
    """Writes the keys of a task's documents in their order, 8 bytes each, and passes the documents on."""

    type = "DEDUP"
    name = "keys"

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = get_datafolder(folder)

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Pass documents on; the file is written when they have ended."""
        keys = array("Q")
        for document in data:
            keys.append(key_of(document))
            yield document
        with self.folder.open(_keys_name(rank), "wb") as file:
            file.write(keys.tobytes())


class ChooseSurvivors(PipelineStep):
    """Writes which documents of each task go, from the pairs that datatrove's `MinhashDedupBuckets` found.

    Runs in one task. Its memory grows with the number of duplicates, not of documents: some 130 bytes each, more in
    large loose groups. Counts: `duplicates`, documents that have any, `removed` and `removed_<split>`.

    Args:
        pairs: folder of pairs.
        keys: folder of what `WriteKeys` wrote.
        removed: folder to write to.
        tasks: number of tasks that read documents.
    """

    type = "DEDUP"
    name = "survivors"

    def __init__(self, pairs: str, keys: str, removed: str, tasks: int) -> None:
        super().__init__()
        self.pairs = get_datafolder(pairs)
        self.keys = get_datafolder(keys)
        self.removed = get_datafolder(removed)
        self.tasks = tasks

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Choose.

        Raises:
            UserError: the folder holds the work of another number of tasks.
        """
        if self.keys.list_files() != [_keys_name(task) for task in range(self.tasks)]:
            problem = f"does not hold the work of {self.tasks} tasks"
            raise UserError(str(self.keys.path), problem, "remove the folder and begin again")
        with self.track_time("task"):
            nodes = self._nodes()
            keys = self._keys_of(nodes)
            order = np.lexsort((nodes, keys))
            nodes, keys = nodes[order], keys[order]
            goes = _goes(self._edges(nodes), keys >> np.uint64(_SPLIT_BIT))
            self._write(nodes[goes])
        self._count(keys, goes)

    def _nodes(self) -> Hashes:
        """The documents that are in a pair, ascending, as task * 2**32 + document."""
        nodes = np.empty(0, np.uint64)
        for name in self.pairs.list_files(glob_pattern="*.dups"):
            nodes = np.union1d(nodes, _read_pairs(self.pairs, name))
        return nodes

    def _keys_of(self, nodes: Hashes) -> Hashes:
        keys = np.empty_like(nodes)
        tasks = nodes >> np.uint64(32)
        for task in np.unique(tasks).tolist():
            chosen = tasks == task
            keys[chosen] = _read(self.keys, _keys_name(task), np.uint64)[nodes[chosen] & np.uint64(0xFFFFFFFF)]
        return keys

    def _edges(self, nodes: Hashes) -> npt.NDArray[np.int64]:
        """Edges between places in `nodes`, the earlier one first, shape (edges, 2), by the later one's place."""
        by_number = np.argsort(nodes)
        ordered = nodes[by_number]
        edges = np.empty(0, np.int64)
        for name in self.pairs.list_files(glob_pattern="*.dups"):
            pairs = by_number[np.searchsorted(ordered, _read_pairs(self.pairs, name))]
            earlier, later = _chains(pairs)
            edges = np.union1d(edges, later << 32 | earlier)
        return np.stack([edges & 0xFFFFFFFF, edges >> 32], axis=1)

    def _write(self, gone: Hashes) -> None:
        gone = np.sort(gone)
        bounds = np.searchsorted(gone, np.arange(self.tasks + 1, dtype=np.uint64) << np.uint64(32))
        for task, (start, end) in enumerate(pairwise(bounds.tolist())):
            with self.removed.open(_removed_name(task), "wb") as file:
                file.write((gone[start:end] & np.uint64(0xFFFFFFFF)).astype("<u4").tobytes())

    def _count(self, keys: Hashes, goes: npt.NDArray[np.bool_]) -> None:
        splits = np.bincount((keys[goes] >> np.uint64(_SPLIT_BIT)).astype(np.int64), minlength=len(PROTECTED))
        found = {"duplicates": len(keys), "removed": int(goes.sum())}
        found |= {f"removed_{split}": number for split, number in zip(PROTECTED, splits.tolist(), strict=True)}
        for name, number in found.items():
            self.stat_update(name, value=number)


def _chains(pairs: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Link the documents of each group of equal signatures in ascending order: the earlier and the later of each link.

    datatrove writes a group as (a, b), (b, c), ... in an order that has nothing to do with splits. Linked in order
    of their keys, those of protected splits hang together without the others.
    """
    begins = np.concatenate([[True], pairs[1:, 0] != pairs[:-1, 1]])[: len(pairs)]
    group = np.cumsum(begins)
    members = np.concatenate([pairs[begins, 0], pairs[:, 1]])
    groups = np.concatenate([group[begins], group])
    order = np.lexsort((members, groups))
    members, groups = members[order], groups[order]
    same = groups[1:] == groups[:-1]
    return members[:-1][same], members[1:][same]


def _goes(edges: npt.NDArray[np.int64], splits: Hashes) -> npt.NDArray[np.bool_]:
    """Whether each document goes; documents stand in order of their keys, edges in order of their later end.

    The root of a group is its earliest document. Splits are joined one after the other, the most protected first,
    and judged before the next one is.
    """
    parent = array("q", range(len(splits)))

    def root(x: int) -> int:
        while parent[x] != x:
            parent[x] = x = parent[parent[x]]
        return x

    goes = np.zeros(len(splits), np.bool_)
    ends = np.searchsorted(splits, np.arange(len(PROTECTED) + 1, dtype=np.uint64))
    for start, end in pairwise(ends.tolist()):
        first, last = np.searchsorted(edges[:, 1], (start, end))
        for a, b in edges[first:last].tolist():
            low, high = sorted((root(a), root(b)))
            parent[high] = low
        goes[start:end] = [root(x) != x for x in range(start, end)]
    return goes


class KeepSurvivors(MinhashDedupFilter):
    """datatrove's filter by the list of those that go, which first sees that list and documents fit.

    Args:
        keys: folder of what `WriteKeys` wrote.
        removed: folder of what `ChooseSurvivors` wrote.
        counting: told of those that go.
    """

    def __init__(self, keys: str, removed: str, counting: CountLeftOut | None = None) -> None:
        super().__init__(removed, counting, lines_to_buffer=1024)
        self.keys = get_datafolder(keys)

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents that stay.

        Raises:
            UserError: duplicates were not looked for, or these are not the documents that were compared.
        """
        if not self.data_folder.isfile(_removed_name(rank)):
            where = f"{self.data_folder.path}/{_removed_name(rank)}"
            raise UserError(where, "is missing", "find the duplicates first, in as many tasks")
        yield from super().run(self._compared(data, rank), rank, world_size)

    def _compared(self, data: Iterator[Document], rank: int) -> Iterator[Document]:
        keys = _read(self.keys, _keys_name(rank), np.uint64)
        number = 0
        for document in data:
            if number == len(keys) or key_of(document) != keys[number]:
                raise self._changed(rank, document.id)
            yield document
            number += 1
        if number != len(keys):
            raise self._changed(rank, "the end")

    def _changed(self, rank: int, what: str) -> UserError:
        problem = f"the documents of task {rank} are not those that were compared, from {what} on"
        return UserError(str(self.keys.path), problem, "remove the folder and begin again")


def _keys_name(rank: int) -> str:
    return f"{rank:05d}.keys"


def _removed_name(rank: int) -> str:
    return f"{rank:06d}.remove"  # as datatrove's filter reads it


def _read(folder: DataFolder, name: str, dtype: Any) -> npt.NDArray[Any]:
    with folder.open(name, "rb") as file:
        return np.frombuffer(file.read(), dtype)


def _read_pairs(folder: DataFolder, name: str) -> Hashes:
    """Pairs of documents as task * 2**32 + document, shape (pairs, 2)."""
    rows = _read(folder, name, "<u4").reshape(-1, 2).astype(np.uint64)
    pairs: Hashes = (rows[:, 0] << np.uint64(32) | rows[:, 1]).reshape(-1, 2)
    return pairs
