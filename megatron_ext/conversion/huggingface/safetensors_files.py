"""Reader and writer of safetensors files with an index, one tensor at a time.

A file consists of the length of the header (8 bytes, little-endian), the header (JSON with dtype, shape and offsets by
tensor name), and the data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from megatron_ext.conversion.core.tensors import TensorInfo, Tensors
from megatron_ext.utils.atomic_files import MAX_VOCABULARY_BYTES, read_regular
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json
from megatron_ext.utils.untrusted_paths import path_within

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names of torch dtypes by the dtype names in a header."""

_NAMES = {f"torch.{dtype}": name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 8
_HINT = "copy the whole checkpoint again"


def _dtype_of_torch(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


class SafetensorsTensors(Tensors):
    """Tensors in the safetensors files of a folder.

    Args:
        folder: folder with `model.safetensors`, or with an index and the files that it lists.
        dtype_of: function from the name of a torch dtype to the dtype, or to a replacement if no tensor will be read.

    Raises:
        UserError: a file is missing, damaged, or has an unsupported dtype.
    """

    def __init__(self, folder: Path, dtype_of: Callable[[str], Any] = _dtype_of_torch) -> None:
        self._files: dict[str, Path] = {}
        self._infos: dict[str, TensorInfo] = {}
        for path in _files_of(folder):
            for key, info in _header(path, dtype_of).items():
                self._files[key], self._infos[key] = path, info

    def infos(self) -> Mapping[str, TensorInfo]:
        """Implement `Tensors.infos`."""
        return self._infos

    def read(self, key: str) -> Tensor:
        """Implement `Tensors.read`.

        The file is memory-mapped while the tensor exists, so only the pages of the tensor use memory.
        """
        with safe_open(self._files[key], framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor


def _files_of(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        try:
            names = parse_json(read_regular(folder / INDEX, MAX_VOCABULARY_BYTES))["weight_map"].values()
            # Caches of downloaded models contain symbolic links to the files.
            paths = sorted({path_within(folder, name, str(folder / INDEX), follow_links=True) for name in names})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(str(folder / INDEX), "cannot be read as an index of safetensors files", _HINT) from error
    elif (folder / SINGLE).is_file():
        paths = [folder / SINGLE]
    else:
        problem = f"contains neither {SINGLE} nor {INDEX}"
        raise UserError(str(folder), problem, "save the model as safetensors (save_pretrained does)")
    for path in paths:
        if not path.is_file():
            raise UserError(str(path), f"is missing, but {INDEX} names it", _HINT)
    return paths


def _header(path: Path, dtype_of: Callable[[str], Any]) -> dict[str, TensorInfo]:
    try:
        with safe_open(path, framework="np") as file:  # only the header is read, which does not need torch
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - no mapping
            names = {key: _DTYPES[part.get_dtype()] for key, part in slices.items()}
            return {key: TensorInfo(tuple(part.get_shape()), dtype_of(names[key])) for key, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(str(path), f"is damaged ({' '.join(str(error).split())})", _HINT) from error
    except KeyError as error:
        raise UserError(str(path), f"has unsupported dtype {error}", f"give one of {', '.join(_DTYPES)}") from None


@dataclass
class Shard:
    """Contents of one safetensors file.

    Attributes:
        infos: the tensors in file order.
        num_bytes: bytes of their data.
    """

    infos: dict[str, TensorInfo] = field(default_factory=dict)
    num_bytes: int = 0


def assign_shards(infos: Mapping[str, TensorInfo], shard_bytes: int) -> dict[str, Shard]:
    """Distribute tensors over files.

    Args:
        infos: the tensors, in order.
        shard_bytes: maximum bytes of data in a file. A larger tensor gets a file of its own.

    Returns:
        The contents of each file, by file name.
    """
    shards = [Shard()]
    for key, info in infos.items():
        if shards[-1].infos and shards[-1].num_bytes + info.num_bytes > shard_bytes:
            shards.append(Shard())
        shards[-1].infos[key] = info
        shards[-1].num_bytes += info.num_bytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, 1)}


def write_safetensors(tensors: Tensors, folder: Path, shard_bytes: int) -> None:
    """Write tensors to safetensors files as they are streamed, and an index if there are several files.

    Args:
        tensors: tensors with dtypes in `_DTYPES`.
        folder: existing folder.
        shard_bytes: maximum bytes of data in a file. A larger tensor gets a file of its own.

    Raises:
        OSError: writing fails.
    """
    shards, stream = assign_shards(tensors.infos(), shard_bytes), tensors.stream()
    for name, shard in shards.items():
        with (folder / name).open("wb") as file:
            file.write(_header_bytes(shard))
            _write_data(file, shard, stream)
    if len(shards) > 1:
        weight_map = {key: name for name, shard in shards.items() for key in shard.infos}
        index = {"metadata": {"total_size": tensors.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _header_bytes(shard: Shard) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, info in shard.infos.items():
        start, end = end, end + info.num_bytes
        header[key] = {"dtype": _NAMES[str(info.dtype)], "shape": list(info.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_data(file: IO[bytes], shard: Shard, stream: Iterator[tuple[str, Tensor]]) -> None:
    import torch

    for expected, info in shard.infos.items():
        key, tensor = next(stream)
        assert (key, tuple(tensor.shape), tensor.dtype) == (expected, info.shape, info.dtype), expected
        file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        del tensor  # freed before the next one is computed
