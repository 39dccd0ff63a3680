"""Index of a torch_dist checkpoint as torch's own data classes. The reader is in `metadata_index`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
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

from megatron_ext.checkpoint import metadata_index
from megatron_ext.checkpoint.metadata_index import IndexClasses, allowed_names, plain_types, read_index

CLASSES = IndexClasses(
    dtypes={name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    layouts={str(one): one for one in vars(torch).values() if isinstance(one, torch.layout)},
    size=torch.Size,
    encoding=_MEM_FORMAT_ENCODING,
    properties=TensorProperties,
    fill_properties=TensorProperties.__setstate__,
    chunk=ChunkStorageMetadata,
    tensor=TensorStorageMetadata,
    object=BytesStorageMetadata,
    index=MetadataIndex,
    location=_StorageInfo,
    storage=StorageMeta,
    metadata=Metadata,
)
TYPES = plain_types(CLASSES)
"""torch's plain types, by their (module, name) in pickles."""

_NAMES = allowed_names(CLASSES)


def size_of(sizes: Any = ()) -> torch.Size:
    """Build a `torch.Size`, as `metadata_index.size_of` does."""
    return cast(torch.Size, metadata_index.size_of(torch.Size, sizes))


def read_metadata(folder: Path) -> Metadata:
    """Read the index of a checkpoint folder, as `metadata_index.read_index` does."""
    return cast(Metadata, read_index(folder, CLASSES, _NAMES))
