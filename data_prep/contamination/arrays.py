"""NumPy files that are written in pieces and appear atomically, and are memory-mapped for reading."""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from datatrove.io import DataFolder

from megatron_ext.utils.atomic_files import rename_when_complete, write_atomically
from megatron_ext.utils.temp_dirs import scratch_folder

Append = Callable[[npt.NDArray[Any]], None]


@contextlib.contextmanager
def open_array_writer(folder: DataFolder, name: str, dtype: npt.DTypeLike) -> Iterator[Append]:
    """Context manager that yields a function to append rows to a one-dimensional array file.

    The file appears under its name when the context ends.

    Args:
        folder: folder of the file. For a remote folder, the file is written to a local disk and then copied.
        name: name of the file, which may include a subfolder.
        dtype: dtype of the rows.
    """
    if folder.is_local():
        with _open_local_writer(Path(folder.path) / name, np.dtype(dtype)) as append:
            yield append
        return
    with scratch_folder("array") as scratch:
        local = scratch / "array.npy"
        with _open_local_writer(local, np.dtype(dtype)) as append:
            yield append
        with local.open("rb") as source, folder.open(name, "wb") as target:
            shutil.copyfileobj(source, target)


@contextlib.contextmanager
def _open_local_writer(path: Path, dtype: np.dtype[Any]) -> Iterator[Append]:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")  # unique: a killed run's worker may write, too
    with rename_when_complete(beside, path), beside.open("wb") as file:
        start = _write_header(file, dtype, 0)

        def append(rows: npt.NDArray[Any]) -> None:
            file.write(np.ascontiguousarray(rows, dtype).data)

        yield append
        rows = (file.tell() - start) // dtype.itemsize
        file.seek(0)
        _write_header(file, dtype, rows)


def _write_header(file: Any, dtype: np.dtype[Any], rows: int) -> int:
    """Write the header for a number of rows and return its length, which NumPy pads to be constant."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (rows,)}
    np.lib.format.write_array_header_1_0(file, header)
    return int(file.tell())


def save_array(folder: DataFolder, name: str, values: npt.NDArray[Any]) -> None:
    """Write a one-dimensional array."""
    with open_array_writer(folder, name, values.dtype) as append:
        append(values)


def load_array(folder: DataFolder, name: str) -> npt.NDArray[Any]:
    """Memory-map an array, so that processes share its pages; a remote file is copied first."""
    if folder.is_local():
        return np.load(f"{folder.path}/{name}", mmap_mode="r", allow_pickle=False)
    with scratch_folder("copy") as scratch:  # the memory map remains valid after the file is removed
        with folder.open(name, "rb") as source, (scratch / "array.npy").open("wb") as copy:
            shutil.copyfileobj(source, copy)
        return np.load(scratch / "array.npy", mmap_mode="r", allow_pickle=False)


def save_json(folder: DataFolder, name: str, values: Any) -> None:
    """Write JSON."""
    if folder.is_local():
        Path(folder.path).mkdir(parents=True, exist_ok=True)
        write_atomically(Path(folder.path) / name, json.dumps(values).encode())
        return
    with folder.open(name, "wt", encoding="utf-8") as file:
        json.dump(values, file)


def load_json(folder: DataFolder, name: str) -> Any:
    """Read JSON."""
    with folder.open(name, "rt", encoding="utf-8") as file:
        return json.load(file)
