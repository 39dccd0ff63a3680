"""Plan that assigns the items of a save to ranks and files. It is computed collectively and reused for later saves."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, _split_by_size_and_type
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

FILES_PER_RANK = 2
"""Number of files per rank. Each file has its own writer thread."""

Item = tuple[WriteItem, io.BytesIO | None]
"""Item to write, and its bytes, or None if the item is a tensor."""


@dataclass(frozen=True)
class RankPlan:
    """Items that this rank writes.

    Attributes:
        files: items of this rank, by file name. Tensors are passed separately, so that a plan does not keep them alive.
        common: state that is the same on all ranks, written by the first rank.
        metadata: content of the index; None except on the first rank.
    """

    files: dict[str, list[Item]]
    common: dict[str, Any]
    metadata: Metadata | None


@dataclass(frozen=True)
class _ViewSpec:
    """Location of a saved tensor: index of its backing tensor, element offset, and number of elements."""

    backing_index: int
    offset: int
    numel: int

    def view_in(self, backing: Sequence[Tensor]) -> Tensor:
        """Return the elements as a 1-D view. It makes few torch calls, because training waits for hundreds of views."""
        base = backing[self.backing_index]
        if base.dim() == 1 and base.numel() == self.numel:
            return base
        return base.as_strided((self.numel,), (1,), base.storage_offset() + self.offset)


class _Writer(FileSystemWriterAsync):
    """Megatron's writer, used for planning only. It exposes the live tensors instead of copying them."""

    files: dict[str, list[tuple[WriteItem, Tensor | io.BytesIO]]]

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        buckets = _split_by_size_and_type(self.thread_count, plan.items)
        self.files = {
            f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}": [
                (item, planner.resolve_data(item)) for item in items
            ]
            for number, items in enumerate(filter(None, buckets))
        }


class Planner:
    """Planner of the saves of one run, whose state always has the same structure.

    In the first two saves the ranks exchange their plans. The first save also checks that the plans form a complete
    state. Once Megatron finds two consecutive plans equal, the plan is settled. Later saves exchange nothing. Their
    tensors are views of the backing tensors at the same offsets as before. Only objects that are not tensors are
    collected again.
    """

    def __init__(self) -> None:
        self._cached_structure: tuple[SavePlan | None, SavePlan | None, bool] = (None, None, False)
        self._metadata: Metadata | None = None
        self._files: dict[str, list[WriteItem]] = {}
        self._view_specs: list[_ViewSpec] = []
        self._backing_layout: list[tuple[Any, ...]] = []

    @property
    def is_settled(self) -> bool:
        """True on all ranks once `reuse` must be called instead of `plan`."""
        return self._cached_structure[2]

    def plan(self, state: dict[str, Any], backing: Sequence[Tensor], folder: Path) -> tuple[RankPlan, list[Tensor]]:
        """Plan a save. A collective call.

        Args:
            state: sharded state dictionary. It is modified.
            backing: tensors of the model and the optimizer, of which the tensors of the state are views.
            folder: folder of the files.

        Returns:
            The plan, and the live tensors, 1-D, in the order in which the plan's files list them.
        """
        sharded, common = save_preprocess(state, validate_access_integrity=self._cached_structure[0] is None)
        (writer, metadata, _), central, local, is_unchanged, _ = save_state_dict_async_plan(
            _items_by_key(sharded),
            _Writer(folder, thread_count=FILES_PER_RANK),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            cached_ckpt_structure=self._cached_structure,
        )
        self._cached_structure = (central, local, is_unchanged)
        self._metadata = metadata if metadata is not None else self._metadata
        items_by_file = writer.files
        tensors = [data for items in items_by_file.values() for _, data in items if isinstance(data, Tensor)]
        if is_unchanged:
            self._files = {name: [item for item, _ in items] for name, items in items_by_file.items()}
            self._view_specs, self._backing_layout = _view_specs(tensors, backing), _shapes_and_dtypes(backing)
        files = {
            name: [(item, None if isinstance(data, Tensor) else data) for item, data in items]
            for name, items in items_by_file.items()
        }
        return RankPlan(files, common, self._metadata), [t.view(-1) for t in tensors]

    def reuse(self, backing: Sequence[Tensor], plain: dict[str, Any]) -> tuple[RankPlan, list[Tensor]]:
        """Return the settled plan and the current tensors, as `plan` does. Not a collective call.

        Args:
            backing: the same tensors as for `plan`, possibly at new addresses.
            plain: objects of the state that are not tensors.
        """
        assert _shapes_and_dtypes(backing) == self._backing_layout, "a run's state always has the same structure"
        sharded, common = save_preprocess(plain, validate_access_integrity=False)
        objects = _items_by_key(sharded)
        files = {name: [(item, objects.get(item.index.fqn)) for item in items] for name, items in self._files.items()}
        return RankPlan(files, common, self._metadata), [spec.view_in(backing) for spec in self._view_specs]


def _items_by_key(sharded: dict[str, Any]) -> dict[str, Any]:
    """Return the objects and tensors that this rank writes, in the format of torch's planner."""
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    return mcore_to_pyt_state_dict(by_key)


def _shapes_and_dtypes(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(t.shape, t.dtype) for t in tensors]


def _view_specs(tensors: Sequence[Tensor], backing: Sequence[Tensor]) -> list[_ViewSpec]:
    """Locate each tensor in the backing tensors."""
    by_storage: dict[int, list[tuple[int, Tensor]]] = {}
    for number, base in enumerate(backing):
        by_storage.setdefault(base.untyped_storage().data_ptr(), []).append((number, base))
    return [_view_spec(t, by_storage.get(t.untyped_storage().data_ptr(), [])) for t in tensors]


def _view_spec(tensor: Tensor, candidates: Sequence[tuple[int, Tensor]]) -> _ViewSpec:
    for number, base in candidates:
        offset = tensor.storage_offset() - base.storage_offset()
        if tensor.dtype == base.dtype and 0 <= offset <= base.numel() - tensor.numel():
            return _ViewSpec(number, int(offset), tensor.numel())
    raise AssertionError(f"a saved tensor of shape {tensor.shape} is no view of the model or its optimizer")
