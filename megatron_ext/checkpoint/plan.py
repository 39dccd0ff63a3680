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
class _Cut:
    """Location of a planned tensor: index among the held tensors, element offset, and number of elements."""

    held: int
    offset: int
    numel: int

    def of(self, held: Sequence[Tensor]) -> Tensor:
        """Return the elements as a 1-D view, with few torch calls, because training waits for hundreds of calls."""
        whole = held[self.held]
        if whole.dim() == 1 and whole.numel() == self.numel:
            return whole
        return whole.as_strided((self.numel,), (1,), whole.storage_offset() + self.offset)


class _Writer(FileSystemWriterAsync):
    """Megatron's writer, used for planning only. It exposes the live tensors instead of copying them."""

    files: dict[str, list[tuple[WriteItem, Tensor | io.BytesIO]]]

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        shares = _split_by_size_and_type(self.thread_count, plan.items)
        self.files = {
            f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}": [
                (item, planner.resolve_data(item)) for item in items
            ]
            for number, items in enumerate(share for share in shares if share)
        }


class Planner:
    """Planner of the saves of one run, whose state always has the same structure.

    In the first two saves the ranks exchange their plans, and the first save also checks that the plans form a complete
    state. Once Megatron finds two consecutive plans equal, the plan is settled. Later saves exchange nothing. They
    take the saved tensors as views of the held tensors, at the same offsets as before. Only objects that are not
    tensors are collected again.
    """

    def __init__(self) -> None:
        self._known: tuple[SavePlan | None, SavePlan | None, bool] = (None, None, False)
        self._metadata: Metadata | None = None
        self._files: dict[str, list[WriteItem]] = {}
        self._cuts: list[_Cut] = []
        self._held: list[tuple[Any, ...]] = []

    @property
    def is_settled(self) -> bool:
        """True on all ranks once `again` must be called instead of `plan`."""
        return self._known[2]

    def plan(self, state: dict[str, Any], held: Sequence[Tensor], folder: Path) -> tuple[RankPlan, list[Tensor]]:
        """Plan a save. A collective call.

        Args:
            state: sharded state dictionary. It is modified.
            held: tensors of the model and the optimizer. Every tensor of the state is a view of one of these tensors.
            folder: folder of the files.

        Returns:
            The plan, and the live tensors, 1-D, in the order in which the plan's files list them.
        """
        sharded, common = save_preprocess(state, validate_access_integrity=self._known[0] is None)
        (writer, metadata, _), central, local, alike, _ = save_state_dict_async_plan(
            _by_key(sharded),
            _Writer(folder, thread_count=FILES_PER_RANK),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            cached_ckpt_structure=self._known,
        )
        self._known = (central, local, alike)
        self._metadata = metadata if metadata is not None else self._metadata
        live = writer.files
        tensors = [data for items in live.values() for _, data in items if isinstance(data, Tensor)]
        if alike:
            self._files = {name: [item for item, _ in items] for name, items in live.items()}
            self._cuts, self._held = _cuts(tensors, held), _structure(held)
        files = {
            name: [(item, None if isinstance(data, Tensor) else data) for item, data in items]
            for name, items in live.items()
        }
        return RankPlan(files, common, self._metadata), [t.view(-1) for t in tensors]

    def again(self, held: Sequence[Tensor], plain: dict[str, Any]) -> tuple[RankPlan, list[Tensor]]:
        """Return the settled plan, in the same form as `plan`.

        Args:
            held: the same tensors as for `plan`, possibly at new addresses.
            plain: objects of the state that are not tensors.
        """
        assert _structure(held) == self._held, "a run's state always has the same structure"
        sharded, common = save_preprocess(plain, validate_access_integrity=False)
        objects = _by_key(sharded)
        files = {name: [(item, objects.get(item.index.fqn)) for item in items] for name, items in self._files.items()}
        return RankPlan(files, common, self._metadata), [cut.of(held) for cut in self._cuts]


def _by_key(sharded: dict[str, Any]) -> dict[str, Any]:
    """Return the objects and tensors that this rank writes, in the format of torch's planner."""
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    return mcore_to_pyt_state_dict(by_key)


def _structure(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(t.shape, t.dtype) for t in tensors]


def _cuts(tensors: Sequence[Tensor], held: Sequence[Tensor]) -> list[_Cut]:
    """Locate each tensor in the held tensors."""
    by_storage: dict[int, list[tuple[int, Tensor]]] = {}
    for number, whole in enumerate(held):
        by_storage.setdefault(whole.untyped_storage().data_ptr(), []).append((number, whole))
    return [_cut(t, by_storage.get(t.untyped_storage().data_ptr(), [])) for t in tensors]


def _cut(tensor: Tensor, candidates: Sequence[tuple[int, Tensor]]) -> _Cut:
    for number, whole in candidates:
        offset = tensor.storage_offset() - whole.storage_offset()
        if tensor.dtype == whole.dtype and 0 <= offset <= whole.numel() - tensor.numel():
            return _Cut(number, int(offset), tensor.numel())
    raise AssertionError(f"what is saved is a view of the model or its optimizer, and one of {tensor.shape} is not")
