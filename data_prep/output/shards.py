"""Writer of WebDataset tar shards, each with an index, so that tokens can be read without scanning the tar."""

from __future__ import annotations

import contextlib
import json
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from datatrove.data import Document

from data_prep.manifest import DomainEntry, ShardEntry
from data_prep.output.tar_members import BLOCK, npy_bytes, tar_end, tar_member
from data_prep.storage import sha256_of
from megatron_ext.utils.atomic_files import fsync_path
from megatron_ext.utils.untrusted_paths import path_within

BUFFER_BYTES = 1 << 20
ENCODE_JSON = json.JSONEncoder(ensure_ascii=False).encode


@dataclass
class _OpenShard:
    path: Path
    stream: BinaryIO
    rows: array[int] = field(default_factory=lambda: array("q"))
    length: int = 0
    tokens: int = 0


class DomainWriter:
    """Writer of the documents of one split and domain to `<root>/<split>/<domain>/000000.tar, ...`.

    Args:
        root: folder of the manifest.
        split: train, validation or test.
        domain: name of the domain and of its folder.
        shard_tokens: minimum number of tokens per shard, except for the last. A shard ends with the document that
            reaches this number.
        prefix: prefix of every sample's key, so that keys of different tasks differ.

    Raises:
        UserError: the domain's name leads out of the folder, or is not a valid folder name.
    """

    def __init__(self, root: Path, split: str, domain: str, shard_tokens: int, prefix: str = "") -> None:
        self._root = root
        self._folder = path_within(root / split, domain, f"domain {domain}")
        self._folder.mkdir(parents=True)
        self._shard_tokens = shard_tokens
        self._prefix = prefix.encode()
        self._shards: list[ShardEntry] = []
        self._open: _OpenShard | None = None
        self.split = split
        self.domain = domain
        self.documents = self.tokens = self.characters = self.bytes = 0

    def add(self, document: Document, tokens: npt.NDArray[np.unsignedinteger]) -> None:
        """Append a document as sample `<key>.json` and `<key>.tokens.npy`, in the order of the calls."""
        if self._open is None:
            self._open = self._start()
        shard = self._open
        metadata = {
            "id": document.id,
            "domain": self.domain,
            "characters": len(document.text),
            "tokens": len(tokens),
            "source": document.metadata["source"],
        }
        key = b"%b%09d" % (self._prefix, self.documents)
        metadata_member, content = tar_member(key + b".json", ENCODE_JSON(metadata).encode()), npy_bytes(tokens)
        tokens_member = tar_member(key + b".tokens.npy", content)
        shard.stream.write(metadata_member)
        shard.stream.write(tokens_member)
        start = shard.length + len(metadata_member) + BLOCK + len(content) - tokens.nbytes
        shard.rows.extend((start, len(tokens)))
        shard.length += len(metadata_member) + len(tokens_member)
        shard.tokens += len(tokens)
        self._count(document, len(tokens))
        if shard.tokens >= self._shard_tokens:
            self._finish()

    def close(self) -> DomainEntry:
        """Finish the last shard and return the entry of the domain."""
        if self._open is not None:
            self._finish()
        return DomainEntry(
            split=self.split,  # type: ignore[arg-type]
            domain=self.domain,
            documents=self.documents,
            tokens=self.tokens,
            characters=self.characters,
            bytes=self.bytes,
            shards=self._shards,
        )

    def abandon(self) -> None:
        """Close an unfinished shard, whose file is about to be removed."""
        if self._open is not None:
            with contextlib.suppress(OSError, ValueError):
                self._open.stream.close()
            self._open = None

    def _count(self, document: Document, tokens: int) -> None:
        self.documents += 1
        self.tokens += tokens
        self.characters += len(document.text)
        self.bytes += len(document.text.encode())

    def _start(self) -> _OpenShard:
        path = self._folder / f"{len(self._shards):06d}.tar"
        return _OpenShard(path, path.open("wb", buffering=BUFFER_BYTES))

    def _finish(self) -> None:
        shard = self._open
        assert shard is not None
        shard.stream.write(tar_end(shard.length))
        shard.stream.close()
        index = shard.path.with_suffix(".index.npy")
        np.save(index, np.frombuffer(shard.rows, np.int64).astype("<i8").reshape(-1, 2), allow_pickle=False)
        for path in (shard.path, index):
            fsync_path(path)
        self._shards.append(
            ShardEntry(
                file=shard.path.relative_to(self._root).as_posix(),
                index=index.relative_to(self._root).as_posix(),
                documents=len(shard.rows) // 2,
                tokens=shard.tokens,
                bytes=shard.path.stat().st_size,
                index_bytes=index.stat().st_size,
                sha256=sha256_of(shard.path),
                index_sha256=sha256_of(index),
            )
        )
        self._open = None
