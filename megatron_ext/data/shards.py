"""Prepared shards as one long token stream."""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.manifest import Manifest, ShardEntry
from megatron_ext.data.shard_file import OpenShard, SparseIndex

MAX_OPEN_FILES = 16384
"""Number of open files for which the process raises its soft limit, if its hard limit allows it."""


def max_open_shards() -> int:
    """Raise the limit of open files, and return the number of shards that a store keeps open.

    Each shard has two files. The shards use a quarter of the files that the process may open. The soft limit, usually
    1024, is raised first, as the Go and Java runtimes do. With a low limit and many shards, most samples would have to
    open a shard, which takes as long as reading the sample.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        with suppress(OSError, ValueError):  # some systems allow less than they report: keep the old limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, (target if soft == resource.RLIM_INFINITY else min(soft, MAX_OPEN_FILES)) // 8)


class TokenStore:
    """Token stream of all documents of some domains of one split, concatenated.

    Domains are in the manifest's order, whatever the order of the names given. Memory: a few integers per shard, and 8
    bytes per 64 documents of the shards read so far.

    Args:
        root: folder of the manifest.
        manifest: manifest of the folder.
        split: train, validation or test.
        domains: names of the domains, in the long or short form. None: every domain of the split.
        pin_shard: returns a context manager that keeps a shard's files under `root`. It is active while the shard is
            opened. None: the files always exist.
        max_open: maximum number of shards open at a time. None: `max_open_shards()`. A file that is removed while it is
            open keeps its disk space.

    Raises:
        UserError: the split or a domain does not exist.
    """

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        split: str,
        domains: Iterable[str] | None = None,
        pin_shard: Callable[[ShardEntry], AbstractContextManager[object]] | None = None,
        max_open: int | None = None,
    ) -> None:
        entries = manifest.select(split, domains)
        self._root, self._pin_shard = root, pin_shard or nullcontext
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._vocab_size = manifest.tokenizer.vocab_size
        self._shards = [shard for entry in entries for shard in entry.shards]
        self._token_starts = _starts([shard.tokens for shard in self._shards])
        self._document_starts = _starts([shard.documents for shard in self._shards])
        self._sparse_indices: dict[int, SparseIndex] = {}
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._max_open = max_open_shards() if max_open is None else max_open
        self.domains = [entry.domain for entry in entries]
        self._domain_starts = _starts([sum(shard.tokens for shard in entry.shards) for entry in entries])

    @property
    def num_tokens(self) -> int:
        """Length of the stream in tokens."""
        return int(self._token_starts[-1])

    @property
    def num_documents(self) -> int:
        """Number of documents in the stream."""
        return int(self._document_starts[-1])

    def domain_range(self, domain: str) -> tuple[int, int]:
        """Return (offset of the first token, number of tokens) of a domain in the stream, by its name in `domains`."""
        index = self.domains.index(domain)
        start, end = self._domain_starts[index : index + 2].tolist()
        return start, end - start

    def shard_range(self, file: str) -> tuple[int, int]:
        """Return (offset of the first token, number of tokens) of a shard in the stream.

        Args:
            file: name of the shard's tar in the manifest.
        """
        index = [shard.file for shard in self._shards].index(file)
        start, end = self._token_starts[index : index + 2].tolist()
        return start, end - start

    def read(self, start: int, length: int) -> npt.NDArray[np.generic]:
        """Return tokens [start, start + length) of the stream in the stored dtype, uint16 or uint32. Read-only.

        Raises:
            IndexError: the range exceeds the stream.
            UserError: a shard is missing or does not match the manifest.
        """
        self._check_range(start, length)
        parts = [self._shard(index).read(first, count) for index, first, count in self._split_by_shard(start, length)]
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, self._dtype)])

    def document_ids(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Return the document index of each token in [start, start + length): int64 [length].

        Documents are counted from 0 over the whole stream.
        """
        self._check_range(start, length)
        parts = [np.empty(0, dtype=np.int64)]
        for index, first, count in self._split_by_shard(start, length):
            found = self._shard(index).documents(first, count)
            document = int(self._document_starts[index]) + found.first
            edges = np.clip(found.starts, first, first + count)
            tokens = edges[1:] - edges[:-1]
            parts.append(np.repeat(np.arange(document, document + len(tokens)), tokens))
        return np.concatenate(parts)

    def document_starts(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Return the first token of each document that begins in [start, start + length), as int64 offset from `start`.

        Empty documents are skipped, because they have no first token.
        """
        self._check_range(start, length)
        parts = [np.empty(0, dtype=np.int64)]
        for index, first, count in self._split_by_shard(start, length):
            found = self._shard(index).documents(first, count).starts
            inside = np.unique(found[(found >= first) & (found < first + count)])  # empty documents have no first token
            parts.append(inside + int(self._token_starts[index]) - start)
        return np.concatenate(parts)

    def _check_range(self, start: int, length: int) -> None:
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise IndexError(f"tokens [{start}, {start + length}) exceed the stream of {self.num_tokens} tokens")

    def _split_by_shard(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Split a range of the stream at shard boundaries.

        Yields (shard index, first token in the shard, number of tokens) for each shard in the range.
        """
        range_end = start + length
        index = int(self._token_starts.searchsorted(start, side="right")) - 1
        while start < range_end:
            first, end = int(self._token_starts[index]), int(self._token_starts[index + 1])
            count = min(range_end, end) - start
            if count:
                yield index, start - first, count
            start, index = start + count, index + 1

    def _shard(self, index: int) -> OpenShard:
        shard = self._open.get(index)
        if shard is not None:
            self._open.move_to_end(index)
            return shard
        entry = self._shards[index]
        with self._pin_shard(entry):
            shard = OpenShard(self._root, entry, self._dtype, self._sparse_indices.get(index), self._vocab_size)
        self._open[index], self._sparse_indices[index] = shard, shard.sparse_index
        if len(self._open) > self._max_open:
            self._open.popitem(last=False)
        return shard


def _starts(counts: list[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
