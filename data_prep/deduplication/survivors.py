"""datatrove steps that choose the document to keep in each group of duplicates.

Every document has a key: its split (test before validation before train), then 62 bits of hash of its id. A document is
removed if it is a duplicate, directly or through other documents, of a document with a smaller key. The documents in
between must belong to the split of the removed document or to a split of higher priority. Therefore, the kept test
documents do not depend on validation or training documents, and the kept validation documents do not depend on training
documents. No training document is kept that was found to be a duplicate of a test or validation document. Two test
documents that are linked only through a training document are both kept. Because a key depends only on the document,
the result does not depend on the number of tasks or workers. The modules `groups` and `elimination` implement this for
more documents than fit in memory.
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
from data_prep.deduplication.groups import link_groups
from data_prep.deduplication.keys import HASH_BITS, SPLIT_PRIORITY, DocumentKeys, document_key, read_keys
from data_prep.deduplication.partitions import Partitions, scratch_folder_beside
from data_prep.ledger import DropCounter
from megatron_ext.utils.errors import UserError

MAX_BLOCK_ROWS = 1 << 20
"""Maximum number of documents, groups or links in memory at once while the survivors are chosen."""


class ChooseSurvivors(PipelineStep):
    """datatrove step that lists the documents of each task to remove, from the pairs of `MinhashDedupBuckets`.

    The step runs in one task. Its memory does not grow with the number of duplicates or groups. Temporary files beside
    the results take up to 56 bytes for each signature that a document shares with another, until the task ends. The
    step's statistics are `duplicates` (documents with any duplicate), `removed` and `removed_<split>`.

    Args:
        pairs: folder of pairs.
        keys: output folder of `WriteKeys`.
        removed: output folder. Temporary files are created beside it and removed at the end.
        tasks: number of tasks that read documents.
        block: maximum number of rows in memory at once, about 400 bytes each.
    """

    type = "DEDUP"
    name = "survivors"

    def __init__(self, pairs: str, keys: str, removed: str, tasks: int, block: int = MAX_BLOCK_ROWS) -> None:
        super().__init__()
        self.pairs = get_datafolder(pairs)
        self.keys = get_datafolder(keys)
        self.removed = get_datafolder(removed)
        self.tasks = tasks
        self.block = block

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Choose the documents to remove.

        Raises:
            UserError: the folder of keys does not contain exactly the files of this number of tasks.
        """
        keys = DocumentKeys(self.keys, self.tasks)
        with self.track_time("task"), scratch_folder_beside(self.removed) as scratch:
            links, members = link_groups(self.pairs, keys, scratch, self.block)
            removed_documents = Partitions(scratch / "gone", 1, self.block)
            removed = self._eliminate(links, removed_documents)
            self._write(removed_documents, keys, scratch / "ascending")
        self._count(sum(members), removed)

    def _eliminate(self, links: Links, removed_documents: Partitions) -> list[int]:
        """Partition the indices of removed documents by range. Return the number of removed documents per split."""
        removed = np.zeros(len(SPLIT_PRIORITY), np.int64)
        for vertices in links.eliminate():
            splits = (vertices[:, 0] >> np.uint64(HASH_BITS)).astype(np.int64)
            removed += np.bincount(splits, minlength=len(SPLIT_PRIORITY))
            removed_documents.add(vertices[:, 1:], vertices[:, 1] // np.uint64(self.block))
        return removed.tolist()

    def _write(self, removed_documents: Partitions, keys: DocumentKeys, ascending: Path) -> None:
        """Write the sorted positions of each task's removed documents.

        The indices of all tasks are first sorted into the file `ascending`, which is then divided by task.
        """
        counts = np.zeros(self.tasks, np.int64)
        with ascending.open("wb") as file:
            for range_index in range(-(-len(keys) // self.block)):
                blocks = [np.empty((0, 1), np.uint64), *removed_documents.drain(range_index)]
                indices = np.sort(np.concatenate(blocks), axis=None)
                file.write(indices.data)
                counts += np.diff(np.searchsorted(indices, keys.offsets.astype(np.uint64)))
        with ascending.open("rb") as source:
            for task, (count, offset) in enumerate(zip(counts.tolist(), keys.offsets.tolist(), strict=False)):
                with self.removed.open(_removed_name(task), "wb") as target:
                    self._copy_positions(source, target, count, offset)

    def _copy_positions(self, source: BinaryIO, target: BinaryIO, count: int, offset: int) -> None:
        for start, end in pairwise([*range(0, count, self.block), count]):
            indices = np.fromfile(source, np.uint64, end - start)
            target.write((indices - np.uint64(offset)).astype("<u4").tobytes())

    def _count(self, duplicates: int, removed: list[int]) -> None:
        statistics = {"duplicates": duplicates, "removed": sum(removed)}
        statistics |= {f"removed_{split}": count for split, count in zip(SPLIT_PRIORITY, removed, strict=True)}
        for name, count in statistics.items():
            self.stat_update(name, value=count)


class KeepSurvivors(MinhashDedupFilter):
    """datatrove's filter by the list of removed documents, with a check that the documents have not changed since.

    Args:
        keys: output folder of `WriteKeys`.
        removed: output folder of `ChooseSurvivors`.
        counter: step that counts the removed documents.
    """

    def __init__(self, keys: str, removed: str, counter: DropCounter | None = None) -> None:
        super().__init__(removed, counter, lines_to_buffer=1024)
        self.keys = get_datafolder(keys)

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents that are kept.

        Raises:
            UserError: the search for duplicates has not run, or it compared other documents.
        """
        if not self.data_folder.isfile(_removed_name(rank)):
            where = f"{self.data_folder.path}/{_removed_name(rank)}"
            raise UserError(where, "is missing", "find the duplicates first, with the same number of tasks")
        yield from super().run(self._check_keys(data, rank), rank, world_size)

    def _check_keys(self, data: Iterator[Document], rank: int) -> Iterator[Document]:
        keys = read_keys(self.keys, rank)
        for document in data:
            if document_key(document) != next(keys, None):
                raise self._changed_error(rank, document.id)
            yield document
        if next(keys, None) is not None:
            raise self._changed_error(rank, "the end")

    def _changed_error(self, rank: int, location: str) -> UserError:
        problem = f"the documents of task {rank} differ from those that were compared, starting at {location}"
        return UserError(str(self.keys.path), problem, "remove the folder and start again")


def _removed_name(rank: int) -> str:
    return f"{rank:06d}.remove"  # the name that datatrove's filter expects
