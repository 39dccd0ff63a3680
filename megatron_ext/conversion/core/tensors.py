"""Named tensors of a checkpoint. Shapes and dtypes are available without reading. Tensors are read one by one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_ext.utils.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Keys of the tensors with one row per token of the vocabulary."""

MAX_SHOWN_NAMES = 4
"""Maximum number of names that an error message lists."""


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor.

    Attributes:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the data."""
        return self.num_elements * self.dtype.itemsize


class Tensors(ABC):
    """Named tensors, read from files or computed from other tensors. Only few tensors are in memory at a time."""

    @abstractmethod
    def infos(self) -> Mapping[str, TensorInfo]:
        """Return the shape and dtype of each tensor by key, in the order that is best for reading."""

    @abstractmethod
    def read(self, key: str) -> Tensor:
        """Return one tensor.

        Raises:
            UserError: the tensor's file is missing or damaged.
        """

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the key and value of each tensor, in the order of `infos`. Yielded tensors are not kept in memory."""
        for key in self.infos():
            yield key, self.read(key)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(info.num_bytes for info in self.infos().values())

    @property
    def num_elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(info.num_elements for info in self.infos().values())


class LazyTensors(Tensors):
    """Tensors that are read by a function.

    Args:
        infos: shape and dtype of each tensor.
        read: function that returns the tensor of a key.
    """

    def __init__(self, infos: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> None:
        self._infos, self._read = infos, read

    def infos(self) -> Mapping[str, TensorInfo]:
        """Implement `Tensors.infos`."""
        return self._infos

    def read(self, key: str) -> Tensor:
        """Implement `Tensors.read`."""
        return self._read(key)


class CombinedTensors(Tensors):
    """Union of the tensors of several sources.

    Args:
        sources: sources by the prefix of their keys.
    """

    def __init__(self, sources: Mapping[str, Tensors]) -> None:
        self._sources = sources
        self._infos = {prefix + key: info for prefix, source in sources.items() for key, info in source.infos().items()}
        self._locations = {prefix + key: (source, key) for prefix, source in sources.items() for key in source.infos()}

    def infos(self) -> Mapping[str, TensorInfo]:
        """Implement `Tensors.infos`."""
        return self._infos

    def read(self, key: str) -> Tensor:
        """Implement `Tensors.read`."""
        source, source_key = self._locations[key]
        return source.read(source_key)

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Implement `Tensors.stream`."""
        for prefix, source in self._sources.items():
            for key, tensor in source.stream():
                yield prefix + key, tensor


class TransformedTensors(Tensors):
    """Tensors that are transformed when they are read.

    Args:
        source: the original tensors.
        transform: function from a key and a tensor to the transformed tensor. It must support the meta device.
    """

    def __init__(self, source: Tensors, transform: Callable[[str, Tensor], Tensor]) -> None:
        import torch

        self._source, self._transform = source, transform
        self._infos = {}
        for key, info in source.infos().items():
            converted = transform(key, torch.empty(info.shape, dtype=info.dtype, device="meta"))
            self._infos[key] = TensorInfo(tuple(converted.shape), converted.dtype)

    def infos(self) -> Mapping[str, TensorInfo]:
        """Implement `Tensors.infos`."""
        return self._infos

    def read(self, key: str) -> Tensor:
        """Implement `Tensors.read`."""
        return self._transform(key, self._source.read(key))

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Implement `Tensors.stream`."""
        for key, tensor in self._source.stream():
            yield key, self._transform(key, tensor)


FP32_PARAMETERS = frozenset({"A_log", "D", "dt_bias", "log_decay", "step_bias", "skip", "decay_bias", "decay_base"})
"""Last name components of the tensors that stay in fp32 in a 16-bit run: parameters of decays and step sizes."""


def convert_dtype(source: Tensors, dtype: torch.dtype | None) -> Tensors:
    """Return the tensors with floating-point values converted to a dtype, or unchanged if `dtype` is None.

    Tensors named in `FP32_PARAMETERS` are never converted to a narrower dtype.
    """
    if dtype is None:
        return source

    def converted(key: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        is_kept = key.rpartition(".")[-1] in FP32_PARAMETERS and tensor.dtype.itemsize > dtype.itemsize
        return tensor if is_kept else tensor.to(dtype)

    return TransformedTensors(source, converted)


def check_keys(expected: Iterable[str], found: Iterable[str], where: str) -> None:
    """Raise if tensors are missing or unexpected.

    Args:
        expected: keys of the expected tensors.
        found: keys of the existing tensors.
        where: file or folder to name in the error message.

    Raises:
        UserError: tensors are missing or unexpected. The message lists the first `MAX_SHOWN_NAMES` keys.
    """
    expected, found = list(expected), list(found)
    missing, unexpected = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unexpected:
        kinds = {"lacks": missing, "has besides": unexpected}
        parts = [f"{kind} {_format_names(names)}" for kind, names in kinds.items() if names]
        problem = f"does not contain the tensors of its configuration: {'; '.join(parts)}"
        raise UserError(where, problem, "give a complete checkpoint with the configuration of its training")


def check_shapes(expected: Mapping[str, TensorInfo], found: Mapping[str, TensorInfo], where: str) -> None:
    """Raise if the keys or shapes of tensors differ from the expected ones. Dtypes may differ.

    Args:
        expected: expected tensors by key.
        found: existing tensors by key.
        where: file or folder to name in the error message.

    Raises:
        UserError: keys or shapes differ. The message contains the first differences.
    """
    check_keys(expected, found, where)
    mismatched = [key for key, info in expected.items() if info.shape != found[key].shape]
    if mismatched:
        key = mismatched[0]
        more = f", and {len(mismatched) - 1} more do not match" if len(mismatched) > 1 else ""
        problem = f"{key} has shape {list(found[key].shape)} instead of {list(expected[key].shape)}{more}"
        raise UserError(where, problem, "give the configuration with which the model was trained")


def _format_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_SHOWN_NAMES])
    return shown if len(names) <= MAX_SHOWN_NAMES else f"{shown} and {len(names) - MAX_SHOWN_NAMES} more"


class _Unpadded(Tensors):
    """Tensors with the vocabulary truncated to its first rows. Shapes and dtypes are computed without torch."""

    def __init__(self, source: Tensors, num_rows: int, keys: frozenset[str]) -> None:
        self._source, self._num_rows, self._keys = source, num_rows, keys
        self._infos = {
            key: replace(info, shape=(min(num_rows, info.shape[0]), *info.shape[1:]))
            if key in keys and info.shape
            else info
            for key, info in source.infos().items()
        }

    def infos(self) -> Mapping[str, TensorInfo]:
        """Implement `Tensors.infos`."""
        return self._infos

    def read(self, key: str) -> Tensor:
        """Implement `Tensors.read`."""
        return self._truncate(key, self._source.read(key))

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Implement `Tensors.stream`."""
        for key, tensor in self._source.stream():
            yield key, self._truncate(key, tensor)

    def _truncate(self, key: str, tensor: Tensor) -> Tensor:
        return tensor[: self._num_rows] if key in self._keys else tensor


def without_padding(source: Tensors, vocab_size: int) -> Tensors:
    """Return the tensors with those in `VOCABULARY` truncated to `vocab_size` rows."""
    return _Unpadded(source, vocab_size, frozenset(VOCABULARY))
