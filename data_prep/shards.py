"""Writing WebDataset tar shards with an index beside each, so that tokens can be read without scanning the tar."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import webdataset
from datatrove.data import Document

from data_prep.manifest import DomainEntry, ShardEntry
from data_prep.storage import sha256_of
from megatron_ext.files import force_to_disk

TAR_BLOCK = 512


@dataclass
class _OpenShard:
    path: Path
    stream: io.BufferedWriter
    tar: Any
    rows: list[tuple[int, int]]
    tokens: int = 0


class DomainWriter:
    """Writes the documents of one (split, domain) to `<root>/<split>/<domain>/000000.tar, ...`.

    Args:
        root: folder of the manifest.
        split: train, validation or test.
        domain: name of the domain, fit for a folder.
        shard_tokens: a shard is closed at the first document that brings it to this many tokens.
        prefix: begins the key of every sample, so that no two tasks write the same.
    """

    def __init__(self, root: Path, split: str, domain: str, shard_tokens: int, prefix: str = "") -> None:
        self._root = root
        self._folder = root / split / domain
        self._folder.mkdir(parents=True)
        self._shard_tokens = shard_tokens
        self._prefix = prefix
        self._shards: list[ShardEntry] = []
        self._open: _OpenShard | None = None
        self.split = split
        self.domain = domain
        self.documents = self.tokens = self.characters = self.bytes = 0

    def add(self, document: Document, tokens: npt.NDArray[np.unsignedinteger]) -> None:
        """Append a document: sample `<key>.json` and `<key>.tokens.npy`, in the order of the calls."""
        if self._open is None:
            self._open = self._start()
        shard = self._open
        facts = {
            "id": document.id,
            "domain": self.domain,
            "characters": len(document.text),
            "tokens": len(tokens),
            "source": document.metadata["source"],
        }
        array = _npy(tokens)
        sample = {"json": json.dumps(facts, ensure_ascii=False).encode(), "tokens.npy": array}
        shard.tar.write({"__key__": f"{self._prefix}{self.documents:09d}", **sample})
        # The writer sorts a sample's members by name: the array is the last, and the tar now stands after its padding.
        start = shard.tar.tarstream.offset - -(-len(array) // TAR_BLOCK) * TAR_BLOCK
        shard.rows.append((start + len(array) - tokens.nbytes, len(tokens)))
        shard.tokens += len(tokens)
        self._count(document, len(tokens))
        if shard.tokens >= self._shard_tokens:
            self._finish()

    def close(self) -> DomainEntry:
        """Finish the last shard and say what was written."""
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
        """Let go of an unfinished shard, whose file is about to be removed."""
        if self._open is not None:
            with contextlib.suppress(OSError, ValueError):
                self._open.tar.close()
                self._open.stream.close()
            self._open = None

    def _count(self, document: Document, tokens: int) -> None:
        self.documents += 1
        self.tokens += tokens
        self.characters += len(document.text)
        self.bytes += len(document.text.encode())

    def _start(self) -> _OpenShard:
        path = self._folder / f"{len(self._shards):06d}.tar"
        stream = path.open("wb")
        # Nothing of the writer, the clock or the umask goes in: the same documents make the same bytes.
        tar = webdataset.TarWriter(stream, encoder=False, mtime=0, user="selectron", group="selectron", mode=0o644)
        return _OpenShard(path, stream, tar, [])

    def _finish(self) -> None:
        shard = self._open
        assert shard is not None
        shard.tar.close()
        shard.stream.close()
        index = shard.path.with_suffix(".index.npy")
        index.write_bytes(_npy(np.array(shard.rows, dtype="<i8").reshape(-1, 2)))
        for path in (shard.path, index):
            force_to_disk(path)
        self._shards.append(
            ShardEntry(
                file=shard.path.relative_to(self._root).as_posix(),
                index=index.relative_to(self._root).as_posix(),
                documents=len(shard.rows),
                tokens=shard.tokens,
                bytes=shard.path.stat().st_size,
                index_bytes=index.stat().st_size,
                sha256=sha256_of(shard.path),
                index_sha256=sha256_of(index),
            )
        )
        self._open = None


def _npy(array: npt.NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
    return buffer.getvalue()
