"""Safe reader of torch.save files. It executes no code from the file.

The format is a zip of uncompressed records: a pickle, and the bytes of each storage that it references. `torch.load`
also has a restricted mode, but other libraries extend its list of allowed classes. This reader only allows the classes
that this module and its caller list.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import zipfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.checkpoint.extent import RefusedPickle
from megatron_ext.checkpoint.metadata_file import TYPES, size_of
from megatron_ext.checkpoint.pickle_names import AllowedName, AllowedNames, ignored_class, ordered_dict
from megatron_ext.checkpoint.restricted_pickle import load
from megatron_ext.utils.atomic_files import open_regular

_PICKLE = "data.pkl"
_LOCAL_HEADER_BYTES = 30
_MAX_PICKLE_BYTES = 1 << 30


@dataclass(frozen=True)
class _StorageType:
    dtype: torch.dtype


@dataclass(frozen=True)
class _Storage:
    data: Tensor
    dtype: torch.dtype


def _rebuild(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, metadata: Any = None) -> Tensor:
    """Implement torch._utils._rebuild_tensor_v2."""
    return _tensor(storage, storage.dtype if type(storage) is _Storage else None, offset, size, stride)


def _rebuild_with_dtype(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> Tensor:
    """Implement torch._utils._rebuild_tensor_v3."""
    return _tensor(storage, dtype, offset, size, stride)


def _rebuild_parameter(data: Any, grad: Any, hooks: Any) -> Tensor:
    if type(data) is not Tensor:
        raise RefusedPickle("has a parameter that is not a tensor")
    return data


def _tensor(storage: Any, dtype: Any, offset: Any, size: Any, stride: Any) -> Tensor:
    if type(storage) is not _Storage or type(dtype) is not torch.dtype:
        raise RefusedPickle("has a tensor without a storage")
    sizes, strides, (start,) = size_of(size), size_of(stride), size_of((offset,))
    if len(sizes) != len(strides):
        raise RefusedPickle("has a tensor whose sizes and strides do not match")
    num_elements = storage.data.numel() // dtype.itemsize
    last_offset = start + sum((length - 1) * step for length, step in zip(sizes, strides, strict=True))
    # A stride of 0 would expand one element into a large tensor at the first copy.
    if sizes.numel() > num_elements or (sizes.numel() and last_offset >= num_elements):
        raise RefusedPickle("has a tensor that is larger than its storage")
    elements = storage.data[: num_elements * dtype.itemsize].view(dtype)
    return elements.as_strided(sizes, strides, start if sizes.numel() else 0)


def _encode_text(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise RefusedPickle("has bytes in an unsupported encoding")
    return text.encode("latin1")


def _ignore_device(*_: Any) -> None:
    """Ignore the device of a tensor."""


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}

NAMES: AllowedNames = {
    **TYPES,
    **{("torch", name): _StorageType(dtype) for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): _StorageType(torch.uint8),
    ("torch", "device"): AllowedName(_ignore_device),
    ("torch._utils", "_rebuild_tensor_v2"): AllowedName(_rebuild),
    ("torch._utils", "_rebuild_tensor_v3"): AllowedName(_rebuild_with_dtype),
    ("torch._utils", "_rebuild_parameter"): AllowedName(_rebuild_parameter),
    ("collections", "OrderedDict"): ordered_dict(),
    ("_codecs", "encode"): AllowedName(_encode_text),
    # DeepSpeed's description of how a tensor was split.
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"): ignored_class(),
}


class _ByteRange(io.RawIOBase):
    """Byte range of a file as a file object, independent of the descriptor's position."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._start, self.length, self._position = descriptor, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise OSError("negative seek position")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self.length - self._position)]
        count = os.preadv(self._descriptor, [view], self._start + self._position) if view else 0
        self._position += count
        return count

    def fill(self, view: memoryview, offset: int) -> None:
        """Fill a whole buffer from an offset.

        Raises:
            RefusedPickle: the file is too short.
        """
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], self._start + offset + done)
            if not count:
                raise RefusedPickle("is truncated")
            done += count


class _Records:
    """Locations of the records in a torch zip file."""

    def __init__(self, byte_range: _ByteRange) -> None:
        self._byte_range = byte_range
        try:
            with zipfile.ZipFile(byte_range) as archive:
                found = {info.filename: info for info in archive.infolist()}
        except (zipfile.BadZipFile, OSError, ValueError, struct.error, NotImplementedError) as error:
            raise RefusedPickle("was not written by torch.save, or is truncated") from error
        pickles = [name for name in found if name.count("/") == 1 and name.endswith(f"/{_PICKLE}")]
        if len(pickles) != 1:
            raise RefusedPickle("was not written by torch.save")
        self._prefix, self._infos = pickles[0].removesuffix(_PICKLE), found
        if "byteorder" in self and self.read("byteorder") != b"little":
            raise RefusedPickle("has a different byte order than this machine")

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._infos

    def locate(self, name: str) -> tuple[int, int]:
        """Return offset and length of a record.

        Raises:
            RefusedPickle: the record is missing, compressed or truncated.
        """
        info = self._infos.get(self._prefix + name)
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise RefusedPickle(f"has no plain record {name[:40] if name.isprintable() else '?'}")
        header = bytearray(_LOCAL_HEADER_BYTES)
        self._byte_range.fill(memoryview(header), info.header_offset)
        start = info.header_offset + _LOCAL_HEADER_BYTES + sum(struct.unpack_from("<HH", header, 26))
        if header[:4] != b"PK\x03\x04" or start + info.file_size > self._byte_range.length:
            raise RefusedPickle("is truncated")
        return start, info.file_size

    def read(self, name: str) -> bytes:
        """Read a small record."""
        start, length = self.locate(name)
        if length > _MAX_PICKLE_BYTES:
            raise RefusedPickle(f"has a pickle of {length} bytes")
        content = bytearray(length)
        self._byte_range.fill(memoryview(content), start)
        return bytes(content)


def load_range(descriptor: int, start: int, length: int, names: AllowedNames = NAMES) -> Any:
    """Load an object written by torch.save into a byte range of a file. Tensors are on the CPU.

    Args:
        descriptor: descriptor of the open file.
        start: offset of the range in bytes.
        length: length of the range in bytes.
        names: classes that the pickle may contain.

    Raises:
        RefusedPickle: the data is damaged, or contains anything but tensors, plain values and `names`.
        OSError: the file cannot be read.
    """
    if start + length > os.fstat(descriptor).st_size:
        raise RefusedPickle("is truncated")
    byte_range = _ByteRange(descriptor, start, length)

    def read_bytes(offset: int, size: int) -> Tensor:
        data = torch.empty(size, dtype=torch.uint8)
        byte_range.fill(data.numpy().data, offset)
        return data

    return _load(byte_range, names, read_bytes)


def load_file(path: Path, names: AllowedNames = NAMES, *, on_disk: bool = False) -> Any:
    """Load an object written by torch.save into a file. Tensors are on the CPU.

    Args:
        path: path of the file.
        names: classes that the pickle may contain.
        on_disk: memory-map tensors, so that they stay on disk until they are read.

    Raises:
        RefusedPickle: see `load_range`.
        OSError: the file cannot be read.
    """
    descriptor = open_regular(path)
    try:
        length = os.fstat(descriptor).st_size
        if not on_disk or not length:
            return load_range(descriptor, 0, length, names)
        mapped = mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY)

        def map_bytes(offset: int, size: int) -> Tensor:
            return torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=offset)

        return _load(_ByteRange(descriptor, 0, length), names, map_bytes)
    finally:
        os.close(descriptor)


def _load(byte_range: _ByteRange, names: AllowedNames, get_bytes: Callable[[int, int], Tensor]) -> Any:
    storages: dict[str, _Storage] = {}

    def storage(identity: Any) -> _Storage:
        if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
            raise RefusedPickle("has a persistent id that is not of a storage")
        _, storage_type, key, _, count = identity
        if type(storage_type) is not _StorageType or type(key) is not str or type(count) is not int:
            raise RefusedPickle("has a persistent id that is not of a storage")
        if key not in storages:
            start, length = records.locate(f"data/{key}")
            if length != count * storage_type.dtype.itemsize:
                raise RefusedPickle("has a storage whose size differs from its pickle")
            data = get_bytes(start, length) if length else torch.empty(0, dtype=torch.uint8)
            storages[key] = _Storage(data, storage_type.dtype)
        if storages[key].dtype != storage_type.dtype:
            raise RefusedPickle("has a storage of two types")
        return storages[key]

    with closing(byte_range):
        records = _Records(byte_range)
        return load(records.read(_PICKLE), names, storage)
