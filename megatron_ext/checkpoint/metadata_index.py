"""Safe reader of `.metadata`, the index of a torch_dist checkpoint. It executes no code from the file.

torch's own `FileSystemReader.read_metadata` is `pickle.load`. This reader only builds data classes and validates each
of their fields. The classes are torch's own (`metadata_file`) or replacements that work without torch
(`metadata_plain`).
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

DAMAGED_HINT = "copy the whole checkpoint again, or give another one"
"""Hint in errors for damaged checkpoints."""

MAX_BYTES = 1 << 30
"""Maximum size of the file. The index of 30,000 tensors on 1,000 ranks takes a tenth of it."""

_MAX_DIMENSIONS = 64
_MAX_SIZE = 1 << 62
_MAX_PATH_LENGTH = 4096
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
class IndexClasses:
    """Classes of the objects in an index.

    Attributes:
        dtypes: dtypes, by torch's names.
        layouts: tensor layouts, by their text, e.g. `torch.strided`.
        size: size of a tensor, a tuple class.
        encoding: enumeration of memory formats.
        properties: properties of a tensor.
        fill_properties: function that sets properties from (dtype, layout, requires_grad, memory format, pin_memory).
        chunk: offsets and sizes of a chunk of a tensor.
        tensor: entry of a tensor.
        object: entry of an object that is not a tensor.
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


def size_of(data_class: type[Any], sizes: Any = ()) -> Any:
    """Build a size from a pickle's arguments.

    Raises:
        RefusedPickle: the arguments are no valid size.
    """
    if type(sizes) not in (tuple, list, data_class) or len(sizes) > _MAX_DIMENSIONS:
        raise RefusedPickle("has an invalid size")
    if not all(type(size) is int and 0 <= size < _MAX_SIZE for size in sizes):
        raise RefusedPickle("has an invalid size")
    return data_class(sizes)


def plain_types(classes: IndexClasses) -> dict[tuple[str, str], Any]:
    """Return torch's plain types, by their (module, name) in pickles."""

    def layout(name: Any) -> Any:
        value = classes.layouts.get(name) if type(name) is str else None
        if value is None:
            raise RefusedPickle("has an invalid layout")
        return value

    return {
        **{("torch", name): value for name, value in classes.dtypes.items()},
        ("torch", "Size"): AllowedName(lambda sizes=(): size_of(classes.size, sizes)),
        ("torch.serialization", "_get_layout"): AllowedName(layout),
    }


def _is(*classes: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in classes


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_SIZE


def _is_any(value: Any) -> bool:
    return True


def _data_class(data_class: type, fields: Mapping[str, Callable[[Any], bool]]) -> AllowedName:
    def fill(instance: Any, state: Any) -> None:
        if type(state) is not dict or not all(type(key) is str and key in fields for key in state):
            raise RefusedPickle(f"has a {data_class.__name__} with other fields than its own")
        for field, value in state.items():
            if not fields[field](value):
                raise RefusedPickle(f"has a {data_class.__name__} whose {field} is a {type(value).__name__}")
            object.__setattr__(instance, field, value)

    return AllowedName(None, lambda: object.__new__(data_class), data_class, fill)


def _build_path(*parts: Any) -> PurePath:
    # A long shared string would be copied into every path built from it.
    if not all(type(part) is str for part in parts) or sum(map(len, parts)) > _MAX_PATH_LENGTH:
        raise RefusedPickle("has an invalid path")
    return PurePath(*parts)


def allowed_names(classes: IndexClasses) -> AllowedNames:
    """Return the classes that an index may name, by their (module, name) in pickles."""
    return {
        **plain_types(classes),
        ("collections", "OrderedDict"): ordered_dict(),
        **{
            (module, name): AllowedName(_build_path)
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
        },
        **_tensor_classes(classes),
        **_index_classes(classes),
        **dict.fromkeys(_IGNORED_CLASSES, ignored_class()),
    }


def _tensor_classes(classes: IndexClasses) -> dict[tuple[str, str], AllowedName]:
    """Return the classes of entries of `state_dict_metadata`."""

    def encoding(value: Any) -> Any:
        if type(value) is not int:
            raise RefusedPickle("has an invalid memory format")
        return classes.encoding(value)

    return {
        (_METADATA, "_MEM_FORMAT_ENCODING"): AllowedName(encoding),
        (_METADATA, "TensorProperties"): _tensor_properties(classes),
        (_METADATA, "ChunkStorageMetadata"): _data_class(
            classes.chunk, {"offsets": _is(classes.size), "sizes": _is(classes.size)}
        ),
        (_METADATA, "TensorStorageMetadata"): _data_class(
            classes.tensor, {"properties": _is(classes.properties), "size": _is(classes.size), "chunks": _is(list)}
        ),
        (_METADATA, "BytesStorageMetadata"): _data_class(classes.object, {}),
    }


def _tensor_properties(classes: IndexClasses) -> AllowedName:
    """Return the entry for `TensorProperties`, whose state is a tuple."""
    types_by_field = (
        tuple({type(dtype) for dtype in classes.dtypes.values()}),
        tuple({type(layout) for layout in classes.layouts.values()}),
        (bool,),
        (classes.encoding,),
        (bool,),
    )

    def fill(instance: Any, state: Any) -> None:
        if (
            type(state) is not tuple
            or len(state) != len(types_by_field)
            or not all(type(value) in allowed for value, allowed in zip(state, types_by_field, strict=True))
        ):
            raise RefusedPickle("has TensorProperties with other fields than their own")
        classes.fill_properties(instance, state)

    return AllowedName(None, lambda: object.__new__(classes.properties), classes.properties, fill)


def _index_classes(classes: IndexClasses) -> dict[tuple[str, str], AllowedName]:
    """Return the classes of the whole index and of its storage locations."""
    return {
        (_METADATA, "MetadataIndex"): _data_class(
            classes.index, {"fqn": _is(str), "offset": _is(classes.size, type(None)), "index": _is(int, type(None))}
        ),
        (_METADATA, "Metadata"): _data_class(
            classes.metadata,
            {
                "state_dict_metadata": _is(dict, OrderedDict),
                "storage_data": _is(dict, OrderedDict),
                **dict.fromkeys(_IGNORED_FIELDS, _is_any),
            },
        ),
        (_FILESYSTEM, "_StorageInfo"): _data_class(
            classes.location,
            {
                "relative_path": _is(str),
                "offset": _is_count,
                "length": _is_count,
                "transform_descriptors": _is(list, type(None)),
            },
        ),
    }


def read_index(folder: Path, classes: IndexClasses, names: AllowedNames) -> Any:
    """Read the index of a checkpoint folder.

    Args:
        folder: folder of the checkpoint.
        classes: classes of its objects.
        names: `allowed_names(kinds)`.

    Raises:
        UserError: the index is missing or damaged, or contains other classes.
    """
    path = folder / FILE_NAME
    try:
        return _validate(load(read_regular(path, MAX_BYTES), names), classes)
    except FileNotFoundError:
        raise UserError(str(path), "is missing, so the checkpoint is damaged", DAMAGED_HINT) from None
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({os_error_reason(error)})", DAMAGED_HINT) from error
    except RefusedPickle as error:
        raise UserError(str(path), f"cannot be read: it {error}", DAMAGED_HINT) from error


def _validate(index: Any, classes: IndexClasses) -> Any:
    """Validate an index and return it without its unused fields.

    Raises:
        RefusedPickle: the index is invalid.
    """
    if type(index) is not classes.metadata:
        raise RefusedPickle("is no checkpoint's metadata")
    entries, locations = vars(index).get("state_dict_metadata"), vars(index).get("storage_data")
    if not entries or not locations:
        raise RefusedPickle("is no checkpoint's metadata")
    stored = sum(
        location.length
        for location in locations.values()
        if type(location) is classes.location and "length" in vars(location)
    )
    for key, entry in entries.items():
        if type(key) is not str or type(entry) not in (classes.tensor, classes.object):
            raise RefusedPickle("describes something that is neither a tensor nor an object")
        if type(entry) is classes.tensor:
            _check_tensor(entry, stored, classes)
    for key, location in locations.items():
        if type(key) is not classes.index or type(location) is not classes.location:
            raise RefusedPickle("has an invalid storage location")
        _check_location(location)
    return classes.metadata(dict(entries), storage_data=dict(locations), storage_meta=classes.storage())


def _check_tensor(entry: Any, stored: int, classes: IndexClasses) -> None:
    if vars(entry).keys() != {"properties", "size", "chunks"} or "dtype" not in vars(entry.properties):
        raise RefusedPickle("describes a tensor without its fields")
    # Allocating such a tensor, or iterating over a dimension, would take too much memory or time.
    if max(entry.size.numel() * entry.properties.dtype.itemsize, *entry.size, 0) > stored:
        raise RefusedPickle("describes a tensor that is larger than the whole checkpoint")
    for chunk in entry.chunks:
        if type(chunk) is not classes.chunk or vars(chunk).keys() != {"offsets", "sizes"}:
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
