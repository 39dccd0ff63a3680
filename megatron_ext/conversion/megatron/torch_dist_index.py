"""Tensors in the index of a torch_dist checkpoint, read with torch's classes or with those of `metadata_plain`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.metadata_index import DAMAGED_HINT, FILE_NAME
from megatron_ext.conversion.core.tensors import TensorInfo
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.untrusted_paths import path_within

_OPTIMIZER_PREFIXES = ("optimizer.", "chained_")
_LAYERS = re.compile(r"^(?P<before>(?:.*\.)?layers\.)(?P<after>[^.\d].*)$")


class TorchDistIndex:
    """Index of the tensors of a checkpoint.

    megatron-core may stack a parameter of all layers in one tensor. Such a tensor is listed as one tensor per layer,
    with the layer's index in the key.

    Args:
        folder: folder of the checkpoint.
        metadata: its index.
        tensor: class of the index entries that are tensors.

    Attributes:
        entries: all tensors by their keys in the index.
        has_optimizer: whether the checkpoint contains tensors of an optimizer.
        infos: shape and dtype of each tensor of the model.
        locations: for each tensor of the model, its key in the index and the layer to select; None: the whole tensor.

    Raises:
        UserError: a file is missing or too short.
    """

    def __init__(self, folder: Path, metadata: Any, tensor: type) -> None:
        _check_files(folder, metadata)
        self.entries: dict[str, Any] = {
            key: entry for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, tensor)
        }
        self.has_optimizer = any(key.startswith(_OPTIMIZER_PREFIXES) for key in self.entries)
        self.infos: dict[str, TensorInfo] = {}
        self.locations: dict[str, tuple[str, int | None]] = {}
        for key, entry in self.entries.items():
            if not key.startswith(_OPTIMIZER_PREFIXES):
                self._add(key, entry)

    def _add(self, key: str, entry: Any) -> None:
        shape, dtype = tuple(entry.size), entry.properties.dtype
        match = _LAYERS.match(key)
        if match is None:
            self.locations[key], self.infos[key] = (key, None), TensorInfo(shape, dtype)
            return
        for layer in range(shape[0]):
            layer_key = f"{match['before']}{layer}.{match['after']}"
            self.locations[layer_key], self.infos[layer_key] = (key, layer), TensorInfo(shape[1:], dtype)


def _check_files(folder: Path, metadata: Any) -> None:
    sizes: dict[str, int] = {}
    for info in metadata.storage_data.values():
        sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
    for name, size in sizes.items():
        path = path_within(folder, name, str(folder / FILE_NAME), follow_links=True)
        if not path.is_file():
            raise UserError(str(path), "is missing, so the checkpoint is damaged", DAMAGED_HINT)
        if path.stat().st_size < size:
            problem = f"has {path.stat().st_size} bytes, fewer than {size}, so the checkpoint is damaged"
            raise UserError(str(path), problem, DAMAGED_HINT)
