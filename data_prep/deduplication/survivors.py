"""datatrove steps of deduplication that datatrove lacks: which document of a group of duplicates stays.

The rule: every document has a key, its split (test before validation before train) and then 62 bits of hash of its id;
a document goes if it is a duplicate, directly or by way of others, of one with a smaller key. Only documents of splits
that are as protected as its own or more are looked at on the way. So what stays of the test split does not depend on
validation or training documents, what stays of validation not on training ones, and no training document stays that
was found a duplicate of one of them. Two test documents that only a training document links both stay. As the key
is the document's own, neither the number of tasks nor of workers changes the result. `groups` and `elimination`
say how that is found for more documents than memory holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from datatrove.data import Document
from datatrove.io import get_datafolder
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.minhash import MinhashDedupFilter

from data_prep.deduplication.elimination import Links
from data_prep.deduplication.groups import linked_groups
from data_prep.deduplication.keys import PROTECTED, SPLIT_BIT, AllKeys, key_of, keys_of
from data_prep.deduplication.partitions import Partitions, scratch_beside
from data_prep.ledger import CountLeftOut
from megatron_ext.errors import UserError

ROWS_AT_A_TIME = 1 << 20
"""Documents, groups or links that are in memory while survivors are chosen."""


class ChooseSurvivors(PipelineStep):
    """Writes which documents of each task go, from the pairs that datatrove's `MinhashDedupBuckets` found.

    Runs in one task. Its memory does not grow with the number of duplicates, nor with their groups: what is more than
    a block lies in files beside the results, up to 56 bytes for each document and signature that it shares, until the
    task ends. Counts: `duplicates`, documents that have any, `removed` and `removed_<split>`.

    Args:
        pairs: folder of pairs.
        keys: folder of what `WriteKeys` wrote.
        removed: folder to write to; files that are in use lie beside it, and are removed.
        tasks: number of tasks that read documents.
        block: rows in memory at a time, some 400 bytes each.
    """

    type = "DEDUP"
    name = "survivors"

    def __init__(self, pairs: str, keys: str, removed: str, tasks: int, block: int = ROWS_AT_A_TIME) -> None:
        super().__init__()
        self.pairs = get_datafolder(pairs)
        self.keys = get_datafolder(keys)
        self.removed = get_datafolder(removed)
        self.tasks = tasks
        self.block = block

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Choose.

        Raises:
            UserError: the folder holds the work of another number of tasks.
        """
        keys = AllKeys(self.keys, self.tasks)
        with self.track_time("task"), scratch_beside(self.removed) as scratch:
            links, found = linked_groups(self.pairs, keys, scratch, self.block)
            gone = Partitions(scratch / "gone", 1, self.block)
            removed = self._eliminate(links, gone)
            self._write(gone, keys, scratch / "ascending")
        self._count(sum(found), removed)

    def _eliminate(self, links: Links, gone: Partitions) -> list[int]:
        """Deal the numbers of documents that go to ranges; how many there are of each split."""
        removed = np.zeros(len(PROTECTED), np.int64)
        for vertices in links.eliminate():
            splits = (vertices[:, 0] >> np.uint64(SPLIT_BIT)).astype(np.int64)
            removed += np.bincount(splits, minlength=len(PROTECTED))
            gone.add(vertices[:, 1:], vertices[:, 1] // np.uint64(self.block))
        return removed.tolist()

    def _write(self, gone: Partitions, keys: AllKeys, ascending: Path) -> None:
        """Write each task's places, ascending, by way of one file of the numbers of all tasks."""
        counts = np.zeros(self.tasks, np.int64)
        with ascending.open("wb") as file:
            for number in range(-(-len(keys) // self.block)):
                numbers = np.sort(np.concatenate([np.empty((0, 1), np.uint64), *gone.drain(number)]), axis=None)
                file.write(numbers.data)
                counts += np.diff(np.searchsorted(numbers, keys.offsets.astype(np.uint64)))
        with ascending.open("rb") as source:
            for task, (count, offset) in enumerate(zip(counts.tolist(), keys.offsets.tolist(), strict=False)):
                with self.removed.open(_removed_name(task), "wb") as target:
                    self._copy_places(source, target, count, offset)

    def _copy_places(self, source: BinaryIO, target: BinaryIO, count: int, offset: int) -> None:
        for start, end in pairwise([*range(0, count, self.block), count]):
            numbers = np.fromfile(source, np.uint64, end - start)
            target.write((numbers - np.uint64(offset)).astype("<u4").tobytes())

    def _count(self, duplicates: int, removed: list[int]) -> None:
        found = {"duplicates": duplicates, "removed": sum(removed)}
        found |= {f"removed_{split}": number for split, number in zip(PROTECTED, removed, strict=True)}
        for name, number in found.items():
            self.stat_update(name, value=number)


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
        keys = keys_of(self.keys, rank)
        for document in data:
            if key_of(document) != next(keys, None):
                raise self._changed(rank, document.id)
            yield document
        if next(keys, None) is not None:
            raise self._changed(rank, "the end")

    def _changed(self, rank: int, what: str) -> UserError:
        problem = f"the documents of task {rank} are not those that were compared, from {what} on"
        return UserError(str(self.keys.path), problem, "remove the folder and begin again")


def _removed_name(rank: int) -> str:
    return f"{rank:06d}.remove"  # as datatrove's filter reads it
