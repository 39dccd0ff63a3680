"""Reader and writer of Megatron's torch_dist checkpoints in a single process, one tensor at a time.

The format is that of torch.distributed.checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from megatron_ext.checkpoint.common_state import read_common_state
from megatron_ext.checkpoint.contents import CheckedFile, FileDigest, compute_digest
from megatron_ext.checkpoint.metadata_index import DAMAGED_HINT
from megatron_ext.checkpoint.reading import RestrictedReader
from megatron_ext.conversion.core.tensors import CombinedTensors, LazyTensors, TensorInfo, Tensors
from megatron_ext.conversion.megatron.torch_dist_index import TorchDistIndex
from megatron_ext.utils.errors import UserError

_OPTIMIZER_STATE = "optimizer.state."


class TorchDistTensors(Tensors):
    """Tensors of the model in a checkpoint, without those of the optimizer.

    Their keys are described in `TorchDistIndex`.

    Args:
        folder: folder with `.metadata`.

    Raises:
        UserError: the checkpoint is damaged or incomplete.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = RestrictedReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._index = TorchDistIndex(folder, self._metadata, TensorStorageMetadata)
        self.has_optimizer = self._index.has_optimizer

    def infos(self) -> Mapping[str, TensorInfo]:
        """Implement `Tensors.infos`."""
        return self._index.infos

    def read(self, key: str) -> Tensor:
        """Implement `Tensors.read`."""
        return self._read(*self._index.locations[key])

    @property
    def optimizer(self) -> Tensors:
        """Optimizer state in our format (see `optim.state`), by `<kind>.<the parameter's key>`."""
        prefix = _OPTIMIZER_STATE
        found = {key: entry for key, entry in self._index.entries.items() if key.startswith(prefix)}
        infos = {
            key.removeprefix(prefix): TensorInfo(tuple(entry.size), entry.properties.dtype)
            for key, entry in found.items()
        }
        return LazyTensors(infos, lambda key: self._read(prefix + key, None))

    def _read(self, key: str, layer: int | None) -> Tensor:
        entry = self._index.entries[key]
        offsets, sizes = [0] * len(entry.size), list(entry.size)
        if layer is not None:
            offsets[0], sizes[0] = layer, 1
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, entry, [chunk])
        assert sum(item.lengths.numel() for item in items) == math.prod(sizes), f"{key} is incomplete"
        planner = _TensorPlanner(torch.Size(sizes), entry.properties.dtype)
        self._reader.read_data(LoadPlan(items), planner)
        return planner.tensor if layer is None else planner.tensor[0]


class _TensorPlanner(DefaultLoadPlanner):
    """Load planner that assembles one tensor. A chunk that is the whole tensor is used directly, without a copy.

    Attributes:
        tensor: the tensor, with the requested shape and dtype.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()
        self._shape, self._dtype = shape, dtype
        self.tensor = torch.empty(0, dtype=dtype)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.type == LoadItemType.TENSOR
        if read_item.lengths == self._shape:
            return cast(Tensor, _CopyTarget(self))
        if self.tensor.shape != self._shape:
            self.tensor = torch.empty(self._shape, dtype=self._dtype)
        ranges = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self.tensor[tuple(slice(start, start + length) for start, length in ranges)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the data is already in place."""


class _CopyTarget:
    """Replacement for the target tensor of torch's reader. `copy_` stores the source tensor instead of copying it."""

    def __init__(self, planner: _TensorPlanner) -> None:
        self._planner = planner

    def detach(self) -> _CopyTarget:
        return self

    def size(self) -> torch.Size:
        return self._planner._shape

    def copy_(self, tensor: Tensor) -> None:
        # A view would keep its whole storage in memory.
        is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        self._planner.tensor = (
            tensor.to(self._planner._dtype) if is_whole else tensor.to(self._planner._dtype, copy=True)
        )


@dataclass(frozen=True)
class OptimizerState:
    """State of an optimizer.

    Attributes:
        tensors: fp32 tensors of the unsharded parameter's shape, by `<kind>.<the parameter's key>`, see `optim.state`.
        schedule: state of the learning-rate schedule as plain values. Its `num_steps` is also Adam's step count.
    """

    tensors: Tensors
    schedule: dict[str, Any]


def read_optimizer(stored: TorchDistTensors, folder: Path) -> OptimizerState | None:
    """Return the optimizer state of a Selectron run; None: the checkpoint contains none in our format.

    Raises:
        UserError: the schedule cannot be read.
    """
    tensors = stored.optimizer
    if not tensors.infos():
        return None
    path, common = read_common_state(folder)
    try:
        return OptimizerState(tensors, dict(common["optimizer"]["schedule"]))
    except (TypeError, KeyError, ValueError):
        raise UserError(str(path), "contains no schedule of an optimizer", DAMAGED_HINT) from None


def write_torch_dist(tensors: Tensors, folder: Path, optimizer: OptimizerState | None = None) -> dict[str, FileDigest]:
    """Write a checkpoint that megatron.core.dist_checkpointing can load under any parallel layout.

    Args:
        tensors: tensors of the model, written as they are streamed.
        folder: existing folder.
        optimizer: optimizer state to write too; None: none.

    Returns:
        Size and checksum of each file, by name.

    Raises:
        OSError: writing fails.
        RuntimeError: writing fails in torch.
    """
    state = {_OPTIMIZER_STATE: optimizer.tensors} if optimizer else {}
    all_tensors = CombinedTensors({"": tensors, **state})
    infos = all_tensors.infos().items()
    shapes = {key: torch.empty(info.shape, dtype=info.dtype, device="meta") for key, info in infos}
    writer, planner = _SequentialWriter(folder), _Planner(all_tensors.stream())
    # These are the steps of torch.distributed.checkpoint.save, which would wrap an OSError in its own exception.
    writer.set_up_storage_writer(is_coordinator=True)
    planner.set_up_planner(shapes, is_coordinator=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(plan, planner).value()])
    torch.save({"optimizer": {"schedule": optimizer.schedule}} if optimizer else {}, folder / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig("torch_dist"), str(folder))
    return writer.written | {
        path.name: compute_digest(path) for path in folder.iterdir() if path.name not in writer.written
    }


class _Planner(DefaultSavePlanner):
    """Save planner that computes each tensor only when it is written."""

    def __init__(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        super().__init__(flatten_state_dict=False)
        self._stream = stream

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        key, tensor = next(self._stream)
        assert key == write_item.index.fqn, f"{key} was read instead of {write_item.index.fqn}"
        # A view would be saved with its whole storage.
        is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)


class _SequentialWriter(filesystem.FileSystemWriter):
    """Storage writer that writes one tensor at a time. torch's writer keeps all tensors of a file in memory.

    Attributes:
        written: size and checksum of each written file, by name.
    """

    written: dict[str, FileDigest]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        results, name = [], f"{plan.storage_data.prefix}0{filesystem.DEFAULT_SUFFIX}"
        with CheckedFile(Path(self.path) / name) as file:
            for item in plan.items:
                results.append(self._write_item(file, planner.resolve_data(item), item, name))
        self.written = {name: file.digest}
        done: Future[list[Any]] = Future()
        done.set_result(results)
        return done

    def _write_item(self, file: Any, tensor: Any, item: WriteItem, name: str) -> Any:
        format_ = filesystem.SerializationFormat.TORCH_SAVE
        return filesystem._write_item(self.transforms, file, tensor, item, name, format_)
