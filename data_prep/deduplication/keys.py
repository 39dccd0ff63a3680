"""Keys that rank a document among its duplicates, stored in files of 8 bytes per document."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import xxhash
from datatrove.data import Document
from datatrove.io import DataFolder, get_datafolder
from datatrove.pipeline.base import PipelineStep

from data_prep.contamination.ngrams import Hashes
from megatron_ext.utils.errors import UserError

SPLIT_PRIORITY = ("test", "validation", "train")
"""Splits in order of priority. Of duplicates in different splits, the document of the earlier split is kept."""

HASH_BITS = 62
"""Number of hash bits in a key. The two bits above are the split's index in `SPLIT_PRIORITY`."""

KEY_BLOCK = 1 << 16
"""Maximum number of keys in memory while a task's keys are written or compared: 0.5 MB."""

_KEY_BYTES = 8


def document_key(document: Document) -> int:
    """Return a document's 64-bit rank among its duplicates: the document with the smallest key is kept."""
    split = SPLIT_PRIORITY.index(document.metadata["split"])
    return split << HASH_BITS | xxhash.xxh3_64_intdigest(document.id.encode()) >> (64 - HASH_BITS)


class WriteKeys(PipelineStep):
    """datatrove step that writes the keys of a task's documents in order, 8 bytes each, and yields the documents."""

    type = "DEDUP"
    name = "keys"

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = get_datafolder(folder)

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents. The file of keys is complete after the last document."""
        keys = array("Q")
        with self.folder.open(_file_name(rank), "wb") as file:
            for document in data:
                keys.append(document_key(document))
                if len(keys) == KEY_BLOCK:
                    file.write(keys.tobytes())
                    del keys[:]
                yield document
            file.write(keys.tobytes())


def read_keys(folder: DataFolder, rank: int) -> Iterator[int]:
    """Yield the keys of a task's documents, in order."""
    with folder.open(_file_name(rank), "rb") as file:
        while content := file.read(KEY_BLOCK * _KEY_BYTES):
            yield from array("Q", content)


class DocumentKeys:
    """Keys of the documents of all tasks. Documents are numbered from 0 over all tasks, in the order of the tasks.

    Attributes:
        offsets: index of each task's first document, then the number of documents, int64, shape (tasks + 1,).

    Args:
        folder: output folder of `WriteKeys`.
        tasks: number of tasks.

    Raises:
        UserError: the folder does not contain exactly the files of this number of tasks.
    """

    def __init__(self, folder: DataFolder, tasks: int) -> None:
        if folder.list_files() != [_file_name(task) for task in range(tasks)]:
            problem = f"does not contain exactly the files of {tasks} tasks"
            raise UserError(str(folder.path), problem, "remove the folder and start again")
        self._folder = folder
        lengths = [int(folder.size(_file_name(task))) // _KEY_BYTES for task in range(tasks)]
        self.offsets = np.cumsum([0, *lengths], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def document_indices(self, tasks: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Hashes:
        """Return the indices of documents, given their tasks and their positions within the tasks.

        Args:
            tasks: task of each document, shape (documents,).
            positions: position of each document within its task, shape (documents,).

        Returns:
            uint64 array, shape (documents,).

        Raises:
            UserError: a task or a position does not exist.
        """
        is_known = tasks < len(self.offsets) - 1
        is_known[is_known] = positions[is_known] < np.diff(self.offsets)[tasks[is_known]]
        if not is_known.all():
            first = int(np.argmin(is_known))
            problem = f"has no key for document {positions[first]} of task {tasks[first]}, which has duplicates"
            raise UserError(str(self._folder.path), problem, "remove the folder and start again")
        return (self.offsets[tasks] + positions).astype(np.uint64)

    def read_range(self, start: int, end: int) -> Hashes:
        """Return the keys of the documents with indices in [start, end): uint64."""
        end = min(end, len(self))
        first, last = np.searchsorted(self.offsets, (start, end - 1), side="right") - 1
        parts = [np.empty(0, np.uint64)]
        for task in range(int(first), int(last) + 1):
            begin, stop = (int(np.clip(x, *self.offsets[task : task + 2]) - self.offsets[task]) for x in (start, end))
            if stop > begin:
                with self._folder.open(_file_name(task), "rb") as file:
                    file.seek(begin * _KEY_BYTES)
                    parts.append(np.frombuffer(file.read((stop - begin) * _KEY_BYTES), np.uint64))
        return np.concatenate(parts)


def _file_name(rank: int) -> str:
    return f"{rank:05d}.keys"
