"""Tensors of a checkpoint, by key: what they are without reading them, and one of them at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_ext.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Our tensors with a row a token."""

SHOWN = 4
"""Names that a message lists; how many there are is said besides."""


@dataclass(frozen=True)
class TensorInfo:
    """What a tensor is.

    Attributes:
        shape: its sizes.
        dtype: its numbers' type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers."""
        return self.num_elements * self.dtype.itemsize


class Tensors(ABC):
    """Named tensors that lie somewhere; few of them are in memory at a time."""

    @abstractmethod
    def infos(self) -> Mapping[str, TensorInfo]:
        """What there is, in the order in which it is best read."""

    @abstractmethod
    def read(self, key: str) -> Tensor:
        """One of them.

        Raises:
            UserError: the file it lies in is missing or damaged.
        """

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """All of them, one after the other; none that was given is held."""
        for key in self.infos():
            yield key, self.read(key)

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return sum(info.num_bytes for info in self.infos().values())

    @property
    def num_elements(self) -> int:
        """Numbers in all."""
        return sum(info.num_elements for info in self.infos().values())


class Listed(Tensors):
    """Tensors that one function reads.

    Args:
        infos: what there is.
        read: see `Tensors.read`.
    """

    def __init__(self, infos: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> None:
        self._infos, self._read = infos, read

    def infos(self) -> Mapping[str, TensorInfo]:
        """See `Tensors.infos`."""
        return self._infos

    def read(self, key: str) -> Tensor:
        """See `Tensors.read`."""
        return self._read(key)


class Joined(Tensors):
    """The tensors of several sources.

    Args:
        sources: by what their keys here begin with.
    """

    def __init__(self, sources: Mapping[str, Tensors]) -> None:
        self._sources = sources
        self._infos = {before + key: info for before, source in sources.items() for key, info in source.infos().items()}
        self._places = {before + key: (source, key) for before, source in sources.items() for key in source.infos()}

    def infos(self) -> Mapping[str, TensorInfo]:
        """See `Tensors.infos`."""
        return self._infos

    def read(self, key: str) -> Tensor:
        """See `Tensors.read`."""
        source, own = self._places[key]
        return source.read(own)

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """See `Tensors.stream`."""
        for before, source in self._sources.items():
            for key, tensor in source.stream():
                yield before + key, tensor


class Changed(Tensors):
    """Tensors each of which is changed as it is read.

    Args:
        source: as they lie.
        change: of a tensor, whose key is given, real or on the meta device.
    """

    def __init__(self, source: Tensors, change: Callable[[str, Tensor], Tensor]) -> None:
        import torch

        self._source, self._change = source, change
        self._infos = {}
        for key, info in source.infos().items():
            changed = change(key, torch.empty(info.shape, dtype=info.dtype, device="meta"))
            self._infos[key] = TensorInfo(tuple(changed.shape), changed.dtype)

    def infos(self) -> Mapping[str, TensorInfo]:
        """See `Tensors.infos`."""
        return self._infos

    def read(self, key: str) -> Tensor:
        """See `Tensors.read`."""
        return self._change(key, self._source.read(key))

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """See `Tensors.stream`."""
        for key, tensor in self._source.stream():
            yield key, self._change(key, tensor)


IN_FP32 = frozenset({"A_log", "D", "dt_bias", "log_decay", "step_bias", "skip", "decay_bias", "decay_base"})
"""Last names of the tensors that a run in 16 bits has in fp32: what decays and steps are made of."""


def in_dtype(source: Tensors, dtype: torch.dtype | None) -> Tensors:
    """The same tensors with their floating-point numbers in another type; None: as they are.

    Those of `IN_FP32` are never made 16 bits wide where they are wider.
    """
    if dtype is None:
        return source

    def changed(key: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        kept = key.rpartition(".")[-1] in IN_FP32 and tensor.dtype.itemsize > dtype.itemsize
        return tensor if kept else tensor.to(dtype)

    return Changed(source, changed)


def check_keys(expected: Iterable[str], found: Iterable[str], where: str) -> None:
    """Refuse tensors that are missing or that nobody knows.

    Raises:
        UserError: names the first of them.
    """
    expected, found = list(expected), list(found)
    missing, unexpected = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unexpected:
        kinds = {"lacks": missing, "has besides": unexpected}
        parts = [f"{kind} {_names(names)}" for kind, names in kinds.items() if names]
        problem = f"does not hold the tensors of its configuration: {'; '.join(parts)}"
        raise UserError(where, problem, "give a whole checkpoint with the configuration it was made with")


def check_shapes(expected: Mapping[str, TensorInfo], found: Mapping[str, TensorInfo], where: str) -> None:
    """Refuse tensors of other names or sizes than expected; their types may differ.

    Raises:
        UserError: names the first of them.
    """
    check_keys(expected, found, where)
    wrong = [key for key, info in expected.items() if info.shape != found[key].shape]
    if wrong:
        key = wrong[0]
        more = f", and {len(wrong) - 1} more do not fit" if len(wrong) > 1 else ""
        problem = f"{key} is {list(found[key].shape)}, its configuration makes it {list(expected[key].shape)}{more}"
        raise UserError(where, problem, "give the configuration that the model was made with")


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


class _Unpadded(Tensors):
    """Tensors of which some are cut to their first rows; what they then are is said without torch."""

    def __init__(self, source: Tensors, rows: int, keys: frozenset[str]) -> None:
        self._source, self._rows, self._keys = source, rows, keys
        self._infos = {
            key: replace(info, shape=(min(rows, info.shape[0]), *info.shape[1:]))
            if key in keys and info.shape
            else info
            for key, info in source.infos().items()
        }

    def infos(self) -> Mapping[str, TensorInfo]:
        """See `Tensors.infos`."""
        return self._infos

    def read(self, key: str) -> Tensor:
        """See `Tensors.read`."""
        return self._cut(key, self._source.read(key))

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """See `Tensors.stream`."""
        for key, tensor in self._source.stream():
            yield key, self._cut(key, tensor)

    def _cut(self, key: str, tensor: Tensor) -> Tensor:
        return tensor[: self._rows] if key in self._keys else tensor


def without_padding(source: Tensors, vocab_size: int) -> Tensors:
    """The same tensors, those of the vocabulary cut to its size."""
    return _Unpadded(source, vocab_size, frozenset(VOCABULARY))
