"""Safe reader of torch.save files. It executes no code from the file.

The format is a zip of uncompressed records: a pickle, and the bytes of each storage that it references. `torch.load`
also has a restricted mode, but other libraries extend its list of allowed classes. This reader only allows those of
this module and its caller.
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
_LOCAL_HEADER = 30
_MAX_PICKLE = 1 << 30


@dataclass(frozen=True)
class _StorageType:
    dtype: torch.dtype


@dataclass(frozen=True)
class _Storage:
    bytes_x: Tensor
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
    held = storage.bytes_x.numel() // dtype.itemsize
    last = start + sum((length - 1) * step for length, step in zip(sizes, strides, strict=True))
    # A stride of 0 would expand one element into a large tensor at the first copy.
    if sizes.numel() > held or (sizes.numel() and last >= held):
        raise RefusedPickle("has a tensor that is larger than its storage")
    whole = storage.bytes_x[: held * dtype.itemsize].view(dtype)
    return whole.as_strided(sizes, strides, start if sizes.numel() else 0)


def _text_to_bytes(text: Any, coding: Any) -> bytes:
    if type(text) is not str or coding != "latin1":
        raise RefusedPickle("has bytes in an unsupported encoding")
    return text.encode("latin1")


def _device(*_: Any) -> None:
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
    ("torch", "device"): AllowedName(_device),
    ("torch._utils", "_rebuild_tensor_v2"): AllowedName(_rebuild),
    ("torch._utils", "_rebuild_tensor_v3"): AllowedName(_rebuild_with_dtype),
    ("torch._utils", "_rebuild_parameter"): AllowedName(_rebuild_parameter),
    ("collections", "OrderedDict"): ordered_dict(),
    ("_codecs", "encode"): AllowedName(_text_to_bytes),
    # DeepSpeed's description of how a tensor was split.
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"): ignored_class(),
}


class _Part(io.RawIOBase):
    """Byte range of a file as a file object, independent of the descriptor's position."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._start, self.length, self._at = descriptor, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise OSError("a position before the file's beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self.length - self._at)]
        count = os.preadv(self._descriptor, [view], self._start + self._at) if view else 0
        self._at += count
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
                raise RefusedPickle("ends before its records do")
            done += count


class _Records:
    """Locations of the records in a torch zip file."""

    def __init__(self, part: _Part) -> None:
        self._part = part
        try:
            with zipfile.ZipFile(part) as archive:
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

    def place(self, name: str) -> tuple[int, int]:
        """Return offset and length of a record.

        Raises:
            RefusedPickle: the record is missing, compressed or truncated.
        """
        info = self._infos.get(self._prefix + name)
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise RefusedPickle(f"has no plain record {name[:40] if name.isprintable() else '?'}")
        header = bytearray(_LOCAL_HEADER)
        self._part.fill(memoryview(header), info.header_offset)
        start = info.header_offset + _LOCAL_HEADER + sum(struct.unpack_from("<HH", header, 26))
        if header[:4] != b"PK\x03\x04" or start + info.file_size > self._part.length:
            raise RefusedPickle("is truncated")
        return start, info.file_size

    def read(self, name: str) -> bytes:
        """Read a small record."""
        start, length = self.place(name)
        if length > _MAX_PICKLE:
            raise RefusedPickle(f"has a pickle of {length} bytes")
        content = bytearray(length)
        self._part.fill(memoryview(content), start)
        return bytes(content)


def load_part(descriptor: int, start: int, length: int, names: AllowedNames = NAMES) -> Any:
    """Load an object written by torch.save into a byte range of a file. Tensors are on the CPU.

    Args:
        descriptor: descriptor of the open file.
        start: offset of the range in bytes.
        length: length of the range in bytes.
        names: classes that its pickle may name.

    Raises:
        RefusedPickle: the data is damaged, or contains anything but tensors, plain values and `names`.
        OSError: the file cannot be read.
    """
    part = _Part(descriptor, start, length)

    def copied(offset: int, size: int) -> Tensor:
        bytes_x = torch.empty(size, dtype=torch.uint8)
        part.fill(bytes_x.numpy().data, offset)
        return bytes_x

    return _load(part, names, copied)


def load_file(path: Path, names: AllowedNames = NAMES, *, on_disk: bool = False) -> Any:
    """Load an object written by torch.save into a file. Tensors are on the CPU.

    Args:
        path: path of the file.
        names: classes that its pickle may name.
        on_disk: memory-map tensors, so that they stay on disk until they are read.

    Raises:
        RefusedPickle: see `load_part`.
        OSError: the file cannot be read.
    """
    descriptor = open_regular(path)
    try:
        length = os.fstat(descriptor).st_size
        if not on_disk or not length:
            return load_part(descriptor, 0, length, names)
        mapped = mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY)

        def lying(offset: int, size: int) -> Tensor:
            return torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=offset)

        return _load(_Part(descriptor, 0, length), names, lying)
    finally:
        os.close(descriptor)


def _load(part: _Part, names: AllowedNames, bytes_at: Callable[[int, int], Tensor]) -> Any:
    storages: dict[str, _Storage] = {}

    def storage(identity: Any) -> _Storage:
        if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
            raise RefusedPickle("has a persistent id of no storage")
        _, kind, key, _, count = identity
        if type(kind) is not _StorageType or type(key) is not str or type(count) is not int:
            raise RefusedPickle("has a persistent id of no storage")
        if key not in storages:
            start, length = records.place(f"data/{key}")
            if length != count * kind.dtype.itemsize:
                raise RefusedPickle("has a storage whose size differs from the stated one")
            bytes_x = bytes_at(start, length) if length else torch.empty(0, dtype=torch.uint8)
            storages[key] = _Storage(bytes_x, kind.dtype)
        if storages[key].dtype != kind.dtype:
            raise RefusedPickle("has a storage of two types")
        return storages[key]

    with closing(part):
        records = _Records(part)
        return load(records.read(_PICKLE), names, storage)
