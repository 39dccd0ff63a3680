"""Which rank writes what into which file: planned together once, and the same at every later save of a run."""

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
"""Each is written by a thread of its own."""

Item = tuple[WriteItem, io.BytesIO | None]
"""What is written, and its bytes; None stands for a tensor."""


@dataclass(frozen=True)
class Plan:
    """What this rank writes of a state.

    Attributes:
        files: by name, the items of this rank. The tensors, which a plan does not keep alive, go with it.
        common: what all ranks have alike, which the first rank writes.
        metadata: what the index says; on the first rank only.
    """

    files: dict[str, list[Item]]
    common: dict[str, Any]
    metadata: Metadata | None


@dataclass(frozen=True)
class _Cut:
    """Where a tensor of a plan lies: in which of those held, how many elements after its first, and how many."""

    held: int
    offset: int
    numel: int

    def of(self, held: Sequence[Tensor]) -> Tensor:
        """The elements, 1-D. Each call of torch's counts here: training waits for hundreds of them."""
        whole = held[self.held]
        if whole.dim() == 1 and whole.numel() == self.numel:
            return whole
        return whole.as_strided((self.numel,), (1,), whole.storage_offset() + self.offset)


class _Writer(FileSystemWriterAsync):
    """Megatron's writer as far as planning goes: it hands over the live tensors instead of copies of its own."""

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
    """Plans the saves of one run, whose state always has the same structure.

    The first two saves exchange the ranks' parts, the first also checks that they make a whole; Megatron finds the two
    alike. From then on the plan is settled: nothing is described or exchanged, tensors are cut from those held as they
    were before, and what is no tensor is taken anew.
    """

    def __init__(self) -> None:
        self._known: tuple[SavePlan | None, SavePlan | None, bool] = (None, None, False)
        self._metadata: Metadata | None = None
        self._files: dict[str, list[WriteItem]] = {}
        self._cuts: list[_Cut] = []
        self._held: list[tuple[Any, ...]] = []

    @property
    def is_settled(self) -> bool:
        """Whether `again` is to be called from now on; on all ranks alike."""
        return self._known[2]

    def plan(self, state: dict[str, Any], held: Sequence[Tensor], folder: Path) -> tuple[Plan, list[Tensor]]:
        """Plan a save; a collective call.

        Args:
            state: sharded state dictionary; it is taken apart.
            held: what all of its tensors are views of.
            folder: where the files will lie.

        Returns:
            The plan, and the live tensors, 1-D, in the order in which its files name them.
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
        return Plan(files, common, self._metadata), [t.view(-1) for t in tensors]

    def again(self, held: Sequence[Tensor], plain: dict[str, Any]) -> tuple[Plan, list[Tensor]]:
        """The settled plan, as `plan` gives it.

        Args:
            held: as for `plan`; wherever they lie now.
            plain: what of the state is no tensor.
        """
        assert _structure(held) == self._held, "a run's state always has the same structure"
        sharded, common = save_preprocess(plain, validate_access_integrity=False)
        objects = _by_key(sharded)
        files = {name: [(item, objects.get(item.index.fqn)) for item in items] for name, items in self._files.items()}
        return Plan(files, common, self._metadata), [cut.of(held) for cut in self._cuts]


def _by_key(sharded: dict[str, Any]) -> dict[str, Any]:
    """The parts that this rank writes, as torch's planner takes them."""
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    return mcore_to_pyt_state_dict(by_key)


def _structure(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(t.shape, t.dtype) for t in tensors]


def _cuts(tensors: Sequence[Tensor], held: Sequence[Tensor]) -> list[_Cut]:
    """Where each of some tensors lies in those held."""
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
