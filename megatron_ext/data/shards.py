"""Prepared shards as one long token stream, read through memory maps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.manifest import Manifest, ShardEntry
from megatron_ext.errors import UserError

OPEN_SHARDS = 256
"""A mapped file holds a file descriptor; a run over thousands of shards must stay below the usual limit of 1024."""


@dataclass(frozen=True)
class _MappedShard:
    content: npt.NDArray[np.uint8]  # the tar, mapped
    offsets: npt.NDArray[np.int64]  # [documents] byte offset of each document's tokens
    starts: npt.NDArray[np.int64]  # [documents + 1] number of the shard's tokens before each document


class TokenStore:
    """All documents of some domains of one split, one after the other, as one stream of tokens.

    Documents stand in the manifest's order of domains, whatever the order of the names given. Memory: a few numbers a
    shard, and 16 bytes a document of the shards that are open.

    Args:
        root: folder of the manifest.
        manifest: what is in it.
        split: train, validation or test.
        domains: their names, in the long or short form; None: every domain of the split.

    Raises:
        UserError: the split or a domain is not there.
    """

    def __init__(self, root: Path, manifest: Manifest, split: str, domains: Iterable[str] | None = None) -> None:
        entries = manifest.select(split, domains)
        self._root = root
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._shards = [shard for entry in entries for shard in entry.shards]
        self._token_starts = _starts([shard.tokens for shard in self._shards])
        self._document_starts = _starts([shard.documents for shard in self._shards])
        self._open: OrderedDict[int, _MappedShard] = OrderedDict()
        self.domains = [entry.domain for entry in entries]

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        return int(self._token_starts[-1])

    @property
    def num_documents(self) -> int:
        """Documents in the stream."""
        return int(self._document_starts[-1])

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length) of the stream.

        Raises:
            IndexError: the range leaves the stream.
            UserError: a shard is missing or does not fit the manifest.
        """
        self._check_range(start, length)
        tokens = np.empty(length, dtype=np.int64)
        filled = 0
        for number, document, first, count in self._pieces(start, length):
            shard = self._shard(number)
            offset = int(shard.offsets[document]) + first * self._dtype.itemsize
            piece = shard.content[offset : offset + count * self._dtype.itemsize]
            tokens[filled : filled + count] = piece.view(self._dtype)
            filled += count
        return tokens

    def document_ids(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """The document, counted from 0 over the whole stream, that each token of [start, start + length) is of."""
        self._check_range(start, length)
        pieces = list(self._pieces(start, length))
        documents = [int(self._document_starts[number]) + document for number, document, _, _ in pieces]
        return np.repeat(np.array(documents, dtype=np.int64), [count for *_, count in pieces])

    def _check_range(self, start: int, length: int) -> None:
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise IndexError(f"tokens [{start}, {start + length}) of a stream of {self.num_tokens}")

    def _pieces(self, start: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """Cut a range of the stream at documents: (shard, document in it, first token of the document, tokens)."""
        end = start + length
        while start < end:
            number = int(np.searchsorted(self._token_starts, start, side="right")) - 1
            base, starts = int(self._token_starts[number]), self._shard(number).starts
            document = int(np.searchsorted(starts, start - base, side="right")) - 1
            count = min(end, base + int(starts[document + 1])) - start
            yield number, document, start - base - int(starts[document]), count
            start += count

    def _shard(self, number: int) -> _MappedShard:
        if number in self._open:
            self._open.move_to_end(number)
        else:
            self._open[number] = _map_shard(self._root, self._shards[number], self._dtype.itemsize)
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        return self._open[number]


def _starts(counts: list[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


def _map_shard(root: Path, entry: ShardEntry, token_bytes: int) -> _MappedShard:
    mend = "copy it again or prepare the data again"
    try:
        index = np.load(root / entry.index, allow_pickle=False)
        content = np.memmap(root / entry.file, dtype=np.uint8, mode="r")
    except (OSError, ValueError, EOFError) as error:
        where = getattr(error, "filename", None) or str(root / entry.file)
        raise UserError(str(where), f"cannot be read ({' '.join(str(error).split())})", mend) from None
    if index.shape != (entry.documents, 2) or int(index[:, 1].sum()) != entry.tokens:
        raise UserError(str(root / entry.index), "does not fit the manifest", mend)
    offsets, counts = index[:, 0].astype(np.int64), index[:, 1].astype(np.int64)
    if int((offsets + counts * token_bytes).max(initial=0)) > len(content):
        raise UserError(str(root / entry.file), f"is truncated: found {len(content)} bytes", mend)
    return _MappedShard(content, offsets, _starts(counts.tolist()))
