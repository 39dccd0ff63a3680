"""The index of a checkpoint, torch's `.metadata`: which tensors there are, and where in which file each part lies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ext.checkpoint.metadata_index import FILE_NAME
from megatron_ext.files import write_whole


class _Writer(FileSystemWriter):
    """Torch's, which would write down the path of the folder: it is renamed, and may be moved."""

    def storage_meta(self) -> None:
        return None


class Index:
    """Of the checkpoints of one run: made anew only where something lies elsewhere than in the one before.

    Reading what the ranks say and making the index each are one call of milliseconds that keeps Python's lock, and
    training has to wait for it.
    """

    def __init__(self) -> None:
        self._results: list[str] = []
        self._content = b""

    def write(self, folder: Path, metadata: Metadata, results: Sequence[str]) -> None:
        """Write it into a checkpoint's folder, and to the disk.

        Args:
            folder: of the checkpoint.
            metadata: of the plan, which is the same at every save of a run.
            results: of each rank, what `encoded` makes of its list of `WriteResult`.
        """
        if self._results == list(results):
            write_whole(folder / FILE_NAME, self._content)
            return
        _Writer(folder).finish(metadata, [_decoded(result) for result in results])
        self._content, self._results = (folder / FILE_NAME).read_bytes(), list(results)


def encoded(results: Sequence[WriteResult]) -> str:
    """Where items lie, as the JSON in which ranks tell each other."""
    rows = []
    for result in results:
        index, place = result.index, result.storage_data
        assert place.transform_descriptors is None, "nothing is compressed here"
        offset = None if index.offset is None else list(index.offset)
        item = [index.fqn, offset, index.index, result.size_in_bytes]
        rows.append([*item, place.relative_path, place.offset, place.length])
    return json.dumps(rows)


def _decoded(results: str) -> list[WriteResult]:
    return [
        WriteResult(
            MetadataIndex(fqn, None if offset is None else torch.Size(offset), index),
            size,
            _StorageInfo(file, start, length),
        )
        for fqn, offset, index, size, file, start, length in json.loads(results)
    ]
