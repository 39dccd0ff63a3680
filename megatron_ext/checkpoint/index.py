"""Writer of a checkpoint's index, torch's `.metadata`: tensors, and file, offset and length of every shard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ext.checkpoint.metadata_index import FILE_NAME
from megatron_ext.utils.atomic_files import write_atomically


class _Writer(FileSystemWriter):
    """torch's writer without the folder path in the metadata, because the folder is renamed and may be moved."""

    def storage_meta(self) -> None:
        return None


class Index:
    """Writer of the indexes of one run's checkpoints. It reuses the previous index if no location changed.

    Building an index takes some milliseconds, during which the GIL is held and training is delayed.
    """

    def __init__(self) -> None:
        self._results: list[str] = []
        self._content = b""

    def write(self, folder: Path, metadata: Metadata, results: Sequence[str]) -> None:
        """Write the index to a checkpoint's folder and sync it to disk.

        Args:
            folder: folder of the checkpoint.
            metadata: metadata of the plan, the same at every save of a run.
            results: write results of each rank, as returned by `encode_results`.
        """
        if self._results == list(results):
            write_atomically(folder / FILE_NAME, self._content)
            return
        _Writer(folder).finish(metadata, [_decode_results(result) for result in results])
        self._content, self._results = (folder / FILE_NAME).read_bytes(), list(results)


def encode_results(results: Sequence[WriteResult]) -> str:
    """Encode write results as JSON, which the ranks exchange.

    Args:
        results: key, file, offset and length of each item that a rank wrote.
    """
    rows = []
    for result in results:
        index, location = result.index, result.storage_data
        assert location.transform_descriptors is None, "checkpoints are not compressed"
        offset = None if index.offset is None else list(index.offset)
        item = [index.fqn, offset, index.index, result.size_in_bytes]
        rows.append([*item, location.relative_path, location.offset, location.length])
    return json.dumps(rows)


def _decode_results(results: str) -> list[WriteResult]:
    return [
        WriteResult(
            MetadataIndex(fqn, None if offset is None else torch.Size(offset), index),
            size,
            _StorageInfo(file, start, length),
        )
        for fqn, offset, index, size, file, start, length in json.loads(results)
    ]
