"""The index of a checkpoint, torch's `.metadata`: which tensors there are, and where in which file each part lies."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemWriter, _metadata_fn
from torch.distributed.checkpoint.metadata import Metadata

from megatron_ext.files import write_whole

FILE_NAME: str = _metadata_fn


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
        self._results: list[bytes] = []
        self._content = b""

    def write(self, folder: Path, metadata: Metadata, results: Sequence[bytes]) -> None:
        """Write it into a checkpoint's folder, and to the disk.

        Args:
            folder: of the checkpoint.
            metadata: of the plan, which is the same at every save of a run.
            results: of each rank, its list of `WriteResult`, pickled.
        """
        if self._results == list(results):
            write_whole(folder / FILE_NAME, self._content)
            return
        _Writer(folder).finish(metadata, [pickle.loads(result) for result in results])
        self._content, self._results = (folder / FILE_NAME).read_bytes(), list(results)
