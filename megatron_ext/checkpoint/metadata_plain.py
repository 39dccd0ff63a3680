"""Replacements for torch's classes of a checkpoint index, to read names, shapes and dtypes without importing torch.

They have the same names as torch's classes, so that error messages are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any, cast

from megatron_ext.checkpoint.metadata_index import IndexClasses, allowed_names, read_index


@dataclass(frozen=True)
class Dtype:
    """Data type of a tensor.

    Attributes:
        name: torch's name.
        itemsize: bytes per element.
        is_floating_point: True for floating-point types.
    """

    name: str
    itemsize: int
    is_floating_point: bool

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True)
class _Layout:
    name: str


class Size(tuple[int, ...]):
    """Size of a tensor."""

    __slots__ = ()

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self)


class MemoryFormat(Enum):
    """torch's numbers for memory formats."""

    CONTIGUOUS = 0
    CHANNELS_LAST = 1
    PRESERVE = 2


class TensorProperties:
    """Properties of a tensor besides its size. Only the dtype is stored."""

    dtype: Dtype


class ChunkStorageMetadata:
    """Offsets and sizes of a chunk of a tensor."""

    offsets: Size
    sizes: Size


class TensorStorageMetadata:
    """Entry of a tensor."""

    properties: TensorProperties
    size: Size
    chunks: list[ChunkStorageMetadata]


class BytesStorageMetadata:
    """Entry of an object that is not a tensor."""


@dataclass(frozen=True)
class MetadataIndex:
    """Key of a storage location."""

    fqn: str
    offset: Size | None = None
    index: int | None = field(default=None, compare=False)


class _StorageInfo:
    relative_path: str
    offset: int
    length: int
    transform_descriptors: list[str] | None = None


class _StorageMeta:
    """Empty storage metadata."""


@dataclass
class Metadata:
    """Index of a checkpoint."""

    state_dict_metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata]
    storage_data: dict[MetadataIndex, _StorageInfo]
    storage_meta: Any = None


def _fill_properties(instance: TensorProperties, state: tuple[Any, ...]) -> None:
    instance.dtype = state[0]


_FLOATS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_INTEGERS = {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
DTYPES: Mapping[str, Dtype] = {
    **{name: Dtype(name, size, True) for name, size in _FLOATS.items()},
    **{name: Dtype(name, size, False) for name, size in _INTEGERS.items()},
}
"""Dtypes of parameters and training state. An index with other dtypes must be read with torch."""

CLASSES = IndexClasses(
    dtypes=DTYPES,
    layouts={"torch.strided": _Layout("torch.strided")},
    size=Size,
    encoding=MemoryFormat,
    properties=TensorProperties,
    fill_properties=_fill_properties,
    chunk=ChunkStorageMetadata,
    tensor=TensorStorageMetadata,
    object=BytesStorageMetadata,
    index=MetadataIndex,
    location=_StorageInfo,
    storage=_StorageMeta,
    metadata=Metadata,
)
_NAMES = allowed_names(CLASSES)


def read_plain(folder: Path) -> Metadata:
    """Read the index of a checkpoint folder, as `metadata_index.read_index` does."""
    return cast(Metadata, read_index(folder, CLASSES, _NAMES))
