"""Rows of integers on disk, partitioned into files by range, for algorithms on data that exceeds the memory.

A row is appended to the file of its range, in no particular order. After all rows of a range are written, the range is
read block by block. Data of any size is thus grouped by range in two sequential passes, in the memory of one block.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from datatrove.io import DataFolder

from data_prep.contamination.ngrams import Hashes
from megatron_ext.utils.temp_dirs import scratch_folder


class Partitions:
    """Rows of 64-bit integers in files of a folder, one file per non-empty range.

    Args:
        folder: folder of the files, created here.
        columns: number of integers per row.
        block: number of rows read at once.
    """

    def __init__(self, folder: Path, columns: int, block: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._columns = columns
        self._block = block

    def add(self, rows: Hashes, ranges: npt.NDArray[np.integer]) -> None:
        """Append rows, shape (rows, columns), to the files of the ranges with the indices `ranges`, shape (rows,)."""
        order = np.argsort(ranges, kind="stable")
        rows, ranges = rows[order], ranges[order]
        bounds = [0, *(np.flatnonzero(np.diff(ranges)) + 1).tolist(), len(rows)]
        for start, end in pairwise(bounds):
            if end > start:
                with self._path(int(ranges[start])).open("ab") as file:
                    file.write(rows[start:end].data)

    def drain(self, index: int) -> Iterator[Hashes]:
        """Yield the rows of range `index` in blocks, shape (rows, columns), then delete the range's file."""
        path = self._path(index)
        if path.exists():
            with path.open("rb") as file:
                while len(rows := np.fromfile(file, np.uint64, self._block * self._columns)):
                    yield rows.reshape(-1, self._columns)
            path.unlink()

    def _path(self, index: int) -> Path:
        return self._folder / f"{index:06d}"


@contextlib.contextmanager
def scratch_folder_beside(folder: DataFolder) -> Iterator[Path]:
    """Context manager that yields an empty scratch folder and removes it at the end.

    A scratch folder that a killed run has left is removed first.

    Args:
        folder: folder beside which the scratch folder is created. For a remote folder, it is created on a local disk.
    """
    if not folder.is_local():
        with scratch_folder("signatures") as scratch:
            yield scratch
        return
    scratch = Path(folder.path).with_name(f"{Path(folder.path).name}.scratch")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch)
