"""`.metadata`, the index of a torch_dist checkpoint, read without running code of its author's.

torch's own `FileSystemReader.read_metadata` is `pickle.load`. This one makes torch's data classes itself, each of its
fields checked, and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _metadata_fn, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_ext.checkpoint.extent import RefusedPickle
from megatron_ext.checkpoint.restricted_pickle import Name, Names, load, ordered, unread
from megatron_ext.errors import UserError
from megatron_ext.files import os_reason, read_regular

FILE_NAME: str = _metadata_fn
MEND = "copy the checkpoint again, whole, or give another one"
MAX_BYTES = 1 << 30
"""The index of 30,000 tensors on 1,000 ranks has a tenth of it."""

_MAX_DIMENSIONS = 64
_MAX_SIZE = 1 << 62
_MAX_PATH = 4096
_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def size_of(numbers: Any = ()) -> torch.Size:
    """`torch.Size` of a pickle's arguments.

    Raises:
        RefusedPickle: they are no sizes.
    """
    if type(numbers) not in (tuple, list, torch.Size) or len(numbers) > _MAX_DIMENSIONS:
        raise RefusedPickle("has a size that is none")
    if not all(type(number) is int and 0 <= number < _MAX_SIZE for number in numbers):
        raise RefusedPickle("has a size that is none")
    return torch.Size(numbers)


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_SIZE


def _anything(value: Any) -> bool:
    return True


def _data_class(kind: type, fields: Mapping[str, Callable[[Any], bool]]) -> Name:
    def fill(instance: Any, state: Any) -> None:
        if type(state) is not dict or not all(type(key) is str and key in fields for key in state):
            raise RefusedPickle(f"has a {kind.__name__} with other fields than its own")
        for field, value in state.items():
            if not fields[field](value):
                raise RefusedPickle(f"has a {kind.__name__} whose {field} is a {type(value).__name__}")
            object.__setattr__(instance, field, value)

    return Name(None, lambda: object.__new__(kind), kind, fill)


def _fill_properties(instance: Any, state: Any) -> None:
    kinds = (torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING, bool)
    if type(state) is not tuple or tuple(map(type, state)) != kinds:
        raise RefusedPickle("has TensorProperties with other fields than their own")
    TensorProperties.__setstate__(instance, state)


def _layout(name: Any) -> torch.layout:
    found = {str(one): one for one in vars(torch).values() if isinstance(one, torch.layout)}.get(name)
    if found is None:
        raise RefusedPickle("has a layout that is none")
    return found


def _path(*parts: Any) -> PurePath:
    # A text that is shared would be copied into every path made of it.
    if not all(type(part) is str for part in parts) or sum(map(len, parts)) > _MAX_PATH:
        raise RefusedPickle("has a path that is none")
    return PurePath(*parts)


def _encoding(value: Any) -> _MEM_FORMAT_ENCODING:
    if type(value) is not int:
        raise RefusedPickle("has a memory format that is none")
    return _MEM_FORMAT_ENCODING(value)


TYPES: Names = {
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch", "Size"): Name(size_of),
    ("torch.serialization", "_get_layout"): Name(_layout),
}
"""torch's plain types, by the names that pickles have for them."""

_SIZE, _NONE = torch.Size, type(None)

_NAMES: Names = {
    **TYPES,
    ("collections", "OrderedDict"): ordered(),
    **{
        (module, name): Name(_path)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    (_METADATA, "_MEM_FORMAT_ENCODING"): Name(_encoding),
    (_METADATA, "TensorProperties"): Name(
        None, lambda: object.__new__(TensorProperties), TensorProperties, _fill_properties
    ),
    (_METADATA, "ChunkStorageMetadata"): _data_class(
        ChunkStorageMetadata, {"offsets": _is(_SIZE), "sizes": _is(_SIZE)}
    ),
    (_METADATA, "TensorStorageMetadata"): _data_class(
        TensorStorageMetadata, {"properties": _is(TensorProperties), "size": _is(_SIZE), "chunks": _is(list)}
    ),
    (_METADATA, "BytesStorageMetadata"): _data_class(BytesStorageMetadata, {}),
    (_METADATA, "MetadataIndex"): _data_class(
        MetadataIndex, {"fqn": _is(str), "offset": _is(_SIZE, _NONE), "index": _is(int, _NONE)}
    ),
    (_METADATA, "StorageMeta"): unread(),
    (_METADATA, "Metadata"): _data_class(
        Metadata,
        {
            "state_dict_metadata": _is(dict, OrderedDict),
            "storage_data": _is(dict, OrderedDict),
            # Read over: nobody here needs them. The last two are Megatron's.
            **dict.fromkeys(("planner_data", "storage_meta", "version", "mcore_data", "all_local_plans"), _anything),
        },
    ),
    (_FILESYSTEM, "_StorageInfo"): _data_class(
        _StorageInfo,
        {
            "relative_path": _is(str),
            "offset": _is_count,
            "length": _is_count,
            "transform_descriptors": _is(list, _NONE),
        },
    ),
    (_FILESYSTEM, "_StoragePrefix"): unread(),
    **{
        (_PLANNER, name): unread()
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    },
}


def read_metadata(folder: Path) -> Metadata:
    """The index of a checkpoint's folder, read once.

    Raises:
        UserError: it is not there, damaged, or holds anything but an index.
    """
    path = folder / FILE_NAME
    try:
        return _checked(load(read_regular(path, MAX_BYTES), _NAMES))
    except FileNotFoundError:
        raise UserError(str(path), "is not there, so the checkpoint is damaged", MEND) from None
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({os_reason(error)})", MEND) from error
    except RefusedPickle as error:
        raise UserError(str(path), f"cannot be read: it {error}", MEND) from error


def _checked(found: Any) -> Metadata:
    """A whole index, of what was read; its extras are left behind.

    Raises:
        RefusedPickle: it is none.
    """
    if type(found) is not Metadata:
        raise RefusedPickle("is no checkpoint's metadata")
    said = vars(found)
    entries, places = said.get("state_dict_metadata"), said.get("storage_data")
    if not entries or not places:
        raise RefusedPickle("is no checkpoint's metadata")
    stored = sum(place.length for place in places.values() if type(place) is _StorageInfo and "length" in vars(place))
    for key, entry in entries.items():
        if type(key) is not str or type(entry) not in (TensorStorageMetadata, BytesStorageMetadata):
            raise RefusedPickle("describes what is no tensor and no object")
        if type(entry) is TensorStorageMetadata:
            _check_tensor(entry, stored)
    for index, place in places.items():
        if type(index) is not MetadataIndex or type(place) is not _StorageInfo:
            raise RefusedPickle("has a place that is none")
        _check_place(place)
    return Metadata(dict(entries), storage_data=dict(places), storage_meta=StorageMeta())


def _check_tensor(entry: TensorStorageMetadata, stored: int) -> None:
    if vars(entry).keys() != {"properties", "size", "chunks"} or "dtype" not in vars(entry.properties):
        raise RefusedPickle("describes a tensor without its fields")
    # Whoever makes room for it, or counts its layers, would do so for ever.
    if max(entry.size.numel() * entry.properties.dtype.itemsize, *entry.size, 0) > stored:
        raise RefusedPickle("describes a tensor that is larger than the whole checkpoint")
    for chunk in entry.chunks:
        if type(chunk) is not ChunkStorageMetadata or vars(chunk).keys() != {"offsets", "sizes"}:
            raise RefusedPickle("describes a part that is none")
        if not len(chunk.offsets) == len(chunk.sizes) == len(entry.size):
            raise RefusedPickle("describes a part of other dimensions than its tensor's")
        if any(a + b > c for a, b, c in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)):
            raise RefusedPickle("describes a part that lies beyond its tensor")


def _check_place(place: _StorageInfo) -> None:
    if not {"relative_path", "offset", "length"} <= vars(place).keys():
        raise RefusedPickle("has a place that is none")
    name = place.relative_path
    if not name or name.startswith(".") or "/" in name or "\\" in name or not name.isprintable():
        raise RefusedPickle("names a file that is not in the checkpoint's folder")
    if place.transform_descriptors:
        raise RefusedPickle("says that its tensors are compressed, which is not read")
