"""Restricted readers of torch_dist checkpoints, for torch's and Megatron's loaders.

The readers of torch and Megatron unpickle `.metadata` and all objects without restriction, so an untrusted checkpoint
could run code. The classes here replace them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import (
    StrictHandling,
    determine_global_metadata,
    validate_integrity_and_strict_load,
)
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load_state_dict
from torch.futures import Future

from megatron_ext.checkpoint.common_state import read_common_state
from megatron_ext.checkpoint.extent import RefusedPickle
from megatron_ext.checkpoint.metadata_file import read_metadata
from megatron_ext.checkpoint.metadata_index import DAMAGED_HINT, FILE_NAME
from megatron_ext.checkpoint.torch_file import load_range
from megatron_ext.parallel.agreement import raise_on_all_ranks
from megatron_ext.utils.atomic_files import open_regular, os_error_reason
from megatron_ext.utils.errors import UserError


class RestrictedReader(FileSystemReader):
    """Variant of torch's checkpoint reader that only unpickles tensors and plain values.

    `.metadata` is read once, so that the validated content is the one that is used.

    Args:
        folder: folder of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index of the checkpoint.

        Raises:
            UserError: see `metadata_file.read_metadata`.
        """
        if self._metadata is None:
            self._metadata = read_metadata(self._folder)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors and objects of a plan and pass them to its planner.

        Raises:
            UserError: a file is missing, damaged or has unsupported content.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            path = self._folder / name
            try:
                self._read_file(path, items, planner)
            except OSError as error:
                raise UserError(str(path), f"cannot be read ({os_error_reason(error)})", DAMAGED_HINT) from error
            except RefusedPickle as error:
                raise UserError(str(path), f"cannot be read: it {error}", DAMAGED_HINT) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, path: Path, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        descriptor = open_regular(path)
        try:
            for item in items:
                location = self.storage_data[item.storage_index]
                value = load_range(descriptor, location.offset, location.length)
                if item.type == LoadItemType.BYTE_IO:
                    cast(_Planner, planner).set_object(item, value)
                    continue
                if not isinstance(value, Tensor):
                    raise RefusedPickle("contains no tensor where one is expected")
                _copy_into_target(item, value, planner)
        finally:
            os.close(descriptor)


def _copy_into_target(item: ReadItem, tensor: Tensor, planner: LoadPlanner) -> None:
    """Copy a tensor into the planner's target, as torch's reader does."""
    if tensor.dim() != len(item.lengths) or any(
        offset + length > size
        for offset, length, size in zip(item.storage_offsets, item.lengths, tensor.shape, strict=True)
    ):
        raise RefusedPickle("contains a tensor whose shape differs from the index")
    source = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
    target = planner.resolve_tensor(item).detach()
    assert target.size() == source.size(), f"{item.storage_index}: {target.size()} and {source.size()}"
    target.copy_(source)
    planner.commit_tensor(item, target)


class _Planner(MCoreLoadPlanner):
    """Megatron's load planner, which accepts decoded objects instead of bytes to unpickle."""

    def set_object(self, item: ReadItem, value: Any) -> None:
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[item.dest_index.fqn], value)
        else:
            self.state_dict[item.dest_index.fqn] = value

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Fail, because torch's implementation would unpickle the bytes."""
        raise AssertionError("the restricted reader decodes objects itself")


def _load_sharded(state: Any, reader: RestrictedReader) -> Any:
    """Read the tensors and objects of a sharded state, as Megatron's `TorchDistLoadShardedStrategy.load` does."""
    tensors = [value for value in nested_values(state) if isinstance(value, ShardedTensor)]
    keys, flat_mapping, rename_mapping = _replace_state_dict_keys_with_sharded_keys(state)
    flat_state = mcore_to_pyt_state_dict(keys, True)
    planner = _Planner(
        shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
    )
    load_state_dict(flat_state, reader, planner=planner)
    loaded = {key: _unwrap_pyt_sharded_tensor(value) for key, value in flat_state.items()}
    loaded = _replace_sharded_keys_with_state_dict_keys(loaded, flat_mapping, rename_mapping)
    _restore_dict_types(loaded, state)
    return loaded


def load_state(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill a sharded state dictionary from a checkpoint. A collective call.

    Args:
        state: dictionary of Megatron's sharded tensors and objects.
        folder: folder of the checkpoint.

    Raises:
        UserError: on every rank, if the checkpoint is damaged, has unsupported content, or lacks a tensor.
    """
    reader = RestrictedReader(folder)
    common: list[Any] = []

    def read() -> None:
        metadata = reader.read_metadata()
        _check_tensors(state, metadata, folder)
        path, value = read_common_state(folder, metadata=metadata)
        if not isinstance(value, dict):
            raise UserError(str(path), "contains no dictionary", DAMAGED_HINT)
        common.append(value)

    raise_on_all_ranks(read)
    try:
        return _merge_loaded(state, common[0], reader)
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, UserError):
                raise failure from error
        raise


def _merge_loaded(state: dict[str, Any], common: dict[str, Any], reader: RestrictedReader) -> dict[str, Any]:
    """Load a checkpoint's sharded state into its common state, by the same steps as `dist_checkpointing.load`.

    Megatron's function itself cannot be used: since 0.17 it opens the files with a reader of its own, which unpickles
    without restriction.
    """
    force_all_tensors_to_non_fp8(state)
    sharded, not_persistent, factories = load_preprocess(state)
    merge(common, not_persistent)
    sharded, _ = extract_sharded_base(sharded)
    metadata = determine_global_metadata(sharded)
    sharded, _, _ = validate_integrity_and_strict_load(sharded, StrictHandling.ASSUME_OK_UNEXPECTED, True, *metadata)
    merge(common, _load_sharded(sharded, reader))
    apply_factory_merges(common, factories)  # in place
    return common


def _check_tensors(state: dict[str, Any], metadata: Metadata, folder: Path) -> None:
    for sharded in nested_values(state):
        if isinstance(sharded, ShardedTensor):
            entry = metadata.state_dict_metadata.get(sharded.key)
            expected = torch.Size(sharded.global_shape)
            if not isinstance(entry, TensorStorageMetadata):
                raise UserError(str(folder / FILE_NAME), f"has no tensor {sharded.key}", DAMAGED_HINT)
            if entry.size != expected and not sharded.allow_shape_mismatch:
                problem = f"has {sharded.key} with the shape {list(entry.size)} instead of {list(expected)}"
                raise UserError(str(folder / FILE_NAME), problem, DAMAGED_HINT)
