"""Reader of one shard. Any range of tokens takes two reads: one of the index file and one of the tar."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.manifest import ShardEntry
from megatron_ext.data.failed import DamagedShard
from megatron_ext.utils.atomic_files import os_error_reason

INDEX_STRIDE = 64
"""Number of documents per entry of `SparseIndex`. The index rows of this many documents take 1 KiB."""

_INDEX_DTYPE = np.dtype("<i8")
_HINT = "copy it again or prepare the data again"


@dataclass(frozen=True)
class SparseIndex:
    """Subset of a shard's index that stays in memory when its files are closed, 1/8 byte per document.

    Attributes:
        header_bytes: number of bytes before the rows of the index file.
        starts: int64 [1 + ceil(documents / STRIDE)], number of tokens before every STRIDE-th document of the shard,
            then the shard's number of tokens.
    """

    header_bytes: int
    starts: npt.NDArray[np.int64]


@dataclass(frozen=True)
class DocumentRange:
    """The n documents that overlap a range of a shard's tokens.

    Attributes:
        first: index in the shard of the first of these documents.
        starts: int64 [n + 1], offset in the shard of each document's first token, then the end of the last document.
        offsets: int64 [n], byte offset of each document's tokens in the tar.
    """

    first: int
    starts: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


class OpenShard:
    """Shard that is open for reading.

    Memory maps are avoided because a truncated file or a disk error would kill the process without naming the file.

    Args:
        root: folder of the manifest.
        entry: entry of the shard in the manifest.
        dtype: dtype of the stored tokens.
        sparse_index: sparse index from an earlier opening. None: read the whole index and compare it with the manifest.
        vocab_size: vocabulary size. Reading a token id at or above it is an error. None: no check.

    Raises:
        DamagedShard: a file is missing, cannot be read or does not match the manifest. The message names the file.
    """

    def __init__(
        self,
        root: Path,
        entry: ShardEntry,
        dtype: np.dtype,
        sparse_index: SparseIndex | None = None,
        vocab_size: int | None = None,
    ) -> None:
        # Paths are joined as text: with many shards each sample opens a shard, and pathlib is slower than `os.open`.
        self._tar_path, self._index_path, self._dtype = f"{root}/{entry.file}", f"{root}/{entry.index}", dtype
        self._name, self._documents = entry.file, entry.documents
        self._vocab_size = vocab_size
        self._tar = self._open_file(self._tar_path)
        self._index = self._open_file(self._index_path)
        self.sparse_index = self._build_sparse_index(entry) if sparse_index is None else sparse_index

    def read(self, start: int, length: int) -> npt.NDArray[np.generic]:
        """Return tokens [start, start + length) of the shard, `length` above 0, in the stored dtype. Read-only.

        Raises:
            DamagedShard: the tar cannot be read, or contains an id outside the vocabulary.
        """
        found, size = self.documents(start, length), self._dtype.itemsize
        edges, begins = found.starts.copy(), found.offsets.copy()
        begins[0] += (start - edges[0]) * size  # only the first and the last document may be partial
        edges[0], edges[-1] = start, start + length
        base = int(begins[0])
        begins -= base
        ends = begins + (edges[1:] - edges[:-1]) * size
        content = self._read(self._tar, self._tar_path, base, int(ends[-1]))
        if len(begins) > 1:
            # Joining bytes is faster than a NumPy assignment for each document of a long sample.
            view = memoryview(content)
            content = b"".join([view[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)])
        tokens = np.frombuffer(content, self._dtype)
        # Without this check, an embedding lookup would fail on the device without naming the file. It takes some µs.
        if self._vocab_size is not None and (largest := int(tokens.max())) >= self._vocab_size:
            problem = f"contains token id {largest}, but the manifest's vocabulary has {self._vocab_size} tokens"
            raise self._damaged(self._tar_path, problem)
        return tokens

    def documents(self, start: int, length: int) -> DocumentRange:
        """Return the documents that overlap tokens [start, start + length) of the shard, `length` above 0."""
        sparse = self.sparse_index.starts
        low = int(sparse.searchsorted(start, side="right")) - 1
        high = int(sparse.searchsorted(start + length - 1, side="right"))
        rows = self._rows(self.sparse_index.header_bytes, low * INDEX_STRIDE, min(high * INDEX_STRIDE, self._documents))
        starts = np.empty(len(rows) + 1, dtype=np.int64)
        starts[0] = sparse[low]
        np.cumsum(rows[:, 1], out=starts[1:])
        starts[1:] += sparse[low]
        first = int(starts.searchsorted(start, side="right")) - 1
        last = int(starts.searchsorted(start + length, side="left"))
        return DocumentRange(low * INDEX_STRIDE + first, starts[first : last + 1], rows[first:last, 0])

    def _open_file(self, path: str) -> int:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(path, error) from None
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _rows(self, header_bytes: int, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Read rows [begin, end) of the index: int64 [end - begin, 2].

        A row contains a document's byte offset in the tar and its number of tokens.
        """
        row_bytes = 2 * _INDEX_DTYPE.itemsize
        content = self._read(self._index, self._index_path, header_bytes + begin * row_bytes, (end - begin) * row_bytes)
        return np.frombuffer(content, _INDEX_DTYPE).astype(np.int64, copy=False).reshape(-1, 2)

    def _build_sparse_index(self, entry: ShardEntry) -> SparseIndex:
        """Read the whole index, and validate it against the manifest and the size of the tar."""
        size = os.fstat(self._index).st_size
        header_bytes = size - 2 * _INDEX_DTYPE.itemsize * entry.documents
        if not _is_header(self._read(self._index, self._index_path, 0, max(header_bytes, 0)), entry.documents):
            raise self._damaged(self._index_path, "does not match the manifest")
        rows = self._rows(header_bytes, 0, entry.documents)
        # Few passes over the rows, because with many shards and a short run this is much of the reading time.
        offsets, tokens = rows.T
        starts = np.zeros(entry.documents + 1, dtype=np.int64)
        np.cumsum(tokens, out=starts[1:])
        ends = np.zeros_like(starts)  # byte offset in the tar after each document, 0 before the first
        np.add(offsets, tokens * self._dtype.itemsize, out=ends[1:])
        in_order = tokens.min(initial=0) >= 0 and (offsets - ends[:-1]).min(initial=0) >= 0
        if not in_order or starts[-1] != entry.tokens:
            raise self._damaged(self._index_path, "does not match the manifest")
        found = os.fstat(self._tar).st_size
        if ends[-1] > found:
            raise self._damaged(self._tar_path, f"is truncated: found {found} bytes")
        sparse = np.empty(-(-entry.documents // INDEX_STRIDE) + 1, dtype=np.int64)
        sparse[:-1], sparse[-1] = starts[:-1:INDEX_STRIDE], entry.tokens
        return SparseIndex(header_bytes, sparse)

    def _read(self, descriptor: int, path: str, offset: int, length: int) -> bytes:
        """Read bytes [offset, offset + length) of a file.

        Raises:
            DamagedShard: the read fails, or the file is too short.
        """
        parts = []
        while length:
            try:
                part = os.pread(descriptor, length, offset)
            except OSError as error:
                raise self._unreadable(path, error) from None
            if not part:
                raise self._damaged(path, f"is truncated: found {os.fstat(descriptor).st_size} bytes")
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _unreadable(self, path: str, error: OSError) -> DamagedShard:
        return self._damaged(path, f"cannot be read ({os_error_reason(error)})")

    def _damaged(self, path: str, problem: str) -> DamagedShard:
        return DamagedShard(path, problem, _HINT, self._name)


def _is_header(content: bytes, documents: int) -> bool:
    """Return True if the bytes are the header of an .npy file of int64 [documents, 2]."""
    if len(content) < 10 or content[:8] != np.lib.format.magic(1, 0):
        return False
    described = content[10:].decode("latin1")
    return all(part in described for part in ("'<i8'", "'fortran_order': False", f"({documents}, 2)"))
