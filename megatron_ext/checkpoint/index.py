"""Checkpoint index, torch's `.metadata`: the tensors, and file and offset of each part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ext.checkpoint.metadata_index import FILE_NAME
from megatron_ext.utils.atomic_files import write_whole


class _Writer(FileSystemWriter):
    """torch's writer without the folder path in the metadata, because the folder is renamed and may be moved."""

    def storage_meta(self) -> None:
        return None


class Index:
    """Writer of the indexes of one run's checkpoints. It reuses the previous index if nothing moved.

    Parsing the ranks' results and building the index are single calls of some milliseconds. They hold the GIL and so
    delay training.
    """

    def __init__(self) -> None:
        self._results: list[str] = []
        self._content = b""

    def write(self, folder: Path, metadata: Metadata, results: Sequence[str]) -> None:
        """Write the index into a checkpoint's folder and sync it to disk.

        Args:
            folder: folder of the checkpoint.
            metadata: metadata of the plan, the same at every save of a run.
            results: each rank's list of `WriteResult`, as returned by `encoded`.
        """
        if self._results == list(results):
            write_whole(folder / FILE_NAME, self._content)
            return
        _Writer(folder).finish(metadata, [_decoded(result) for result in results])
        self._content, self._results = (folder / FILE_NAME).read_bytes(), list(results)


def encoded(results: Sequence[WriteResult]) -> str:
    """Encode the locations of items as JSON, the form in which ranks exchange them."""
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
