"""Safe reader of `.metadata`, the index of a torch_dist checkpoint. It executes no code from the file.

torch's own `FileSystemReader.read_metadata` is `pickle.load`. This reader only builds data classes and validates each
of their fields. They are either torch's own (`metadata_file`) or stand-ins that work without torch (`metadata_plain`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from megatron_ext.checkpoint.extent import RefusedPickle
from megatron_ext.checkpoint.pickle_names import AllowedName, AllowedNames, ignored_class, ordered_dict
from megatron_ext.checkpoint.restricted_pickle import load
from megatron_ext.utils.atomic_files import os_error_reason, read_regular
from megatron_ext.utils.errors import UserError

FILE_NAME = ".metadata"
"""Name of the file in torch."""

MEND = "copy the whole checkpoint again, or give another one"
MAX_BYTES = 1 << 30
"""Largest index. That of 30,000 tensors on 1,000 ranks takes a tenth of it."""

_MAX_DIMENSIONS = 64
_MAX_SIZE = 1 << 62
_MAX_PATH = 4096
_IGNORED_FIELDS = ("planner_data", "storage_meta", "version", "mcore_data", "all_local_plans")
"""Ignored fields. The last two are Megatron's."""
_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_IGNORED_CLASSES = (
    (_METADATA, "StorageMeta"),
    (_FILESYSTEM, "_StoragePrefix"),
    (_PLANNER, "SavePlan"),
    (_PLANNER, "WriteItem"),
    (_PLANNER, "WriteItemType"),
    (_PLANNER, "TensorWriteData"),
    (_PLANNER, "BytesIOWriteData"),
)
"""(module, name) of classes whose contents are not read."""


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """Classes of the objects in an index.

    Attributes:
        dtypes: dtypes, by torch's names.
        layouts: tensor layouts, by their text, e.g. `torch.strided`.
        size: size of a tensor, a tuple class.
        encoding: enumeration of memory formats.
        properties: properties of a tensor.
        fill_properties: function that sets properties from (dtype, layout, requires_grad, memory format, pin_memory).
        chunk: offsets and sizes of a part of a tensor.
        tensor: entry of a tensor.
        object: entry of an object that is no tensor.
        index: key of a storage location.
        location: storage location: a file, and offset and length in it.
        storage: storage metadata, which is not used.
        metadata: the whole index.
    """

    dtypes: Mapping[str, Any]
    layouts: Mapping[str, Any]
    size: type[Any]
    encoding: type[Any]
    properties: type[Any]
    fill_properties: Callable[[Any, tuple[Any, ...]], None]
    chunk: type[Any]
    tensor: type[Any]
    object: type[Any]
    index: type[Any]
    location: type[Any]
    storage: type[Any]
    metadata: type[Any]


def size_of(kind: type[Any], numbers: Any = ()) -> Any:
    """Build a size from a pickle's arguments.

    Raises:
        RefusedPickle: the arguments are no valid size.
    """
    if type(numbers) not in (tuple, list, kind) or len(numbers) > _MAX_DIMENSIONS:
        raise RefusedPickle("has an invalid size")
    if not all(type(number) is int and 0 <= number < _MAX_SIZE for number in numbers):
        raise RefusedPickle("has an invalid size")
    return kind(numbers)


def types(kinds: Kinds) -> dict[tuple[str, str], Any]:
    """Return torch's plain types, by their (module, name) in pickles."""

    def layout(name: Any) -> Any:
        found = kinds.layouts.get(name) if type(name) is str else None
        if found is None:
            raise RefusedPickle("has an invalid layout")
        return found

    return {
        **{("torch", name): value for name, value in kinds.dtypes.items()},
        ("torch", "Size"): AllowedName(lambda numbers=(): size_of(kinds.size, numbers)),
        ("torch.serialization", "_get_layout"): AllowedName(layout),
    }


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_SIZE


def _anything(value: Any) -> bool:
    return True


def _data_class(kind: type, fields: Mapping[str, Callable[[Any], bool]]) -> AllowedName:
    def fill(instance: Any, state: Any) -> None:
        if type(state) is not dict or not all(type(key) is str and key in fields for key in state):
            raise RefusedPickle(f"has a {kind.__name__} with other fields than its own")
        for field, value in state.items():
            if not fields[field](value):
                raise RefusedPickle(f"has a {kind.__name__} whose {field} is a {type(value).__name__}")
            object.__setattr__(instance, field, value)

    return AllowedName(None, lambda: object.__new__(kind), kind, fill)


def _path(*parts: Any) -> PurePath:
    # A long shared string would be copied into every path built from it.
    if not all(type(part) is str for part in parts) or sum(map(len, parts)) > _MAX_PATH:
        raise RefusedPickle("has an invalid path")
    return PurePath(*parts)


def allowed_names(kinds: Kinds) -> AllowedNames:
    """Return the classes that an index may name, by their (module, name) in pickles."""
    return {
        **types(kinds),
        ("collections", "OrderedDict"): ordered_dict(),
        **{
            (module, name): AllowedName(_path)
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
        },
        **_tensor_classes(kinds),
        **_index_classes(kinds),
        **dict.fromkeys(_IGNORED_CLASSES, ignored_class()),
    }


def _tensor_classes(kinds: Kinds) -> dict[tuple[str, str], AllowedName]:
    """Return the classes of entries of `state_dict_metadata`."""

    def encoding(value: Any) -> Any:
        if type(value) is not int:
            raise RefusedPickle("has an invalid memory format")
        return kinds.encoding(value)

    return {
        (_METADATA, "_MEM_FORMAT_ENCODING"): AllowedName(encoding),
        (_METADATA, "TensorProperties"): _tensor_properties(kinds),
        (_METADATA, "ChunkStorageMetadata"): _data_class(
            kinds.chunk, {"offsets": _is(kinds.size), "sizes": _is(kinds.size)}
        ),
        (_METADATA, "TensorStorageMetadata"): _data_class(
            kinds.tensor, {"properties": _is(kinds.properties), "size": _is(kinds.size), "chunks": _is(list)}
        ),
        (_METADATA, "BytesStorageMetadata"): _data_class(kinds.object, {}),
    }


def _tensor_properties(kinds: Kinds) -> AllowedName:
    """Return the entry for `TensorProperties`, whose state is a tuple."""
    types_by_field = (
        tuple({type(dtype) for dtype in kinds.dtypes.values()}),
        tuple({type(layout) for layout in kinds.layouts.values()}),
        (bool,),
        (kinds.encoding,),
        (bool,),
    )

    def fill(instance: Any, state: Any) -> None:
        if (
            type(state) is not tuple
            or len(state) != len(types_by_field)
            or not all(type(value) in allowed for value, allowed in zip(state, types_by_field, strict=True))
        ):
            raise RefusedPickle("has TensorProperties with other fields than their own")
        kinds.fill_properties(instance, state)

    return AllowedName(None, lambda: object.__new__(kinds.properties), kinds.properties, fill)


def _index_classes(kinds: Kinds) -> dict[tuple[str, str], AllowedName]:
    """Return the classes of the whole index and of its storage locations."""
    return {
        (_METADATA, "MetadataIndex"): _data_class(
            kinds.index, {"fqn": _is(str), "offset": _is(kinds.size, type(None)), "index": _is(int, type(None))}
        ),
        (_METADATA, "Metadata"): _data_class(
            kinds.metadata,
            {
                "state_dict_metadata": _is(dict, OrderedDict),
                "storage_data": _is(dict, OrderedDict),
                **dict.fromkeys(_IGNORED_FIELDS, _anything),
            },
        ),
        (_FILESYSTEM, "_StorageInfo"): _data_class(
            kinds.location,
            {
                "relative_path": _is(str),
                "offset": _is_count,
                "length": _is_count,
                "transform_descriptors": _is(list, type(None)),
            },
        ),
    }


def read_index(folder: Path, kinds: Kinds, names: AllowedNames) -> Any:
    """Read the index of a checkpoint folder.

    Args:
        folder: folder of the checkpoint.
        kinds: classes of its objects.
        names: `allowed_names(kinds)`.

    Raises:
        UserError: the index is missing, damaged, or contains anything else.
    """
    path = folder / FILE_NAME
    try:
        return _checked(load(read_regular(path, MAX_BYTES), names), kinds)
    except FileNotFoundError:
        raise UserError(str(path), "is missing, so the checkpoint is damaged", MEND) from None
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({os_error_reason(error)})", MEND) from error
    except RefusedPickle as error:
        raise UserError(str(path), f"cannot be read: it {error}", MEND) from error


def _checked(found: Any, kinds: Kinds) -> Any:
    """Validate an index and return it without its unused fields.

    Raises:
        RefusedPickle: it is invalid.
    """
    if type(found) is not kinds.metadata:
        raise RefusedPickle("is no checkpoint's metadata")
    entries, locations = vars(found).get("state_dict_metadata"), vars(found).get("storage_data")
    if not entries or not locations:
        raise RefusedPickle("is no checkpoint's metadata")
    stored = sum(
        location.length
        for location in locations.values()
        if type(location) is kinds.location and "length" in vars(location)
    )
    for key, entry in entries.items():
        if type(key) is not str or type(entry) not in (kinds.tensor, kinds.object):
            raise RefusedPickle("describes something that is neither a tensor nor an object")
        if type(entry) is kinds.tensor:
            _check_tensor(entry, stored, kinds)
    for index, location in locations.items():
        if type(index) is not kinds.index or type(location) is not kinds.location:
            raise RefusedPickle("has an invalid storage location")
        _check_location(location)
    return kinds.metadata(dict(entries), storage_data=dict(locations), storage_meta=kinds.storage())


def _check_tensor(entry: Any, stored: int, kinds: Kinds) -> None:
    if vars(entry).keys() != {"properties", "size", "chunks"} or "dtype" not in vars(entry.properties):
        raise RefusedPickle("describes a tensor without its fields")
    # Allocating it, or iterating over a dimension, would take too much memory or time.
    if max(entry.size.numel() * entry.properties.dtype.itemsize, *entry.size, 0) > stored:
        raise RefusedPickle("describes a tensor that is larger than the whole checkpoint")
    for chunk in entry.chunks:
        if type(chunk) is not kinds.chunk or vars(chunk).keys() != {"offsets", "sizes"}:
            raise RefusedPickle("describes an invalid part")
        if not len(chunk.offsets) == len(chunk.sizes) == len(entry.size):
            raise RefusedPickle("describes a part with a different number of dimensions than its tensor")
        if any(a + b > c for a, b, c in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)):
            raise RefusedPickle("describes a part that lies beyond its tensor")


def _check_location(location: Any) -> None:
    if not {"relative_path", "offset", "length"} <= vars(location).keys():
        raise RefusedPickle("has an invalid storage location")
    name = location.relative_path
    if not name or name.startswith(".") or "/" in name or "\\" in name or not name.isprintable():
        raise RefusedPickle("names a file that is not in the checkpoint's folder")
    if location.transform_descriptors:
        raise RefusedPickle("states that its tensors are compressed, which is not supported")
