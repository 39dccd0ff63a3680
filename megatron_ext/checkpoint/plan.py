"""Which rank writes what into which file: planned together once, and the same at every later save of a run."""

from __future__ import annotations

import io
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
        writer: torch's, which writes the index when all is there.
        metadata: what the index says; on the first rank only.
    """

    files: dict[str, list[Item]]
    common: dict[str, Any]
    writer: FileSystemWriterAsync
    metadata: Metadata | None


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
    alike, and from the third on nothing is exchanged.
    """

    def __init__(self) -> None:
        self._known: tuple[SavePlan | None, SavePlan | None, bool] = (None, None, False)
        self._metadata: Metadata | None = None

    def plan(self, state: dict[str, Any], folder: Path) -> tuple[Plan, list[Tensor]]:
        """Plan a save; a collective call.

        Args:
            state: sharded state dictionary; it is taken apart.
            folder: where the files will lie.

        Returns:
            The plan, and the live tensors in the order in which its files name them.
        """
        sharded, common = save_preprocess(state, validate_access_integrity=self._known[0] is None)
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        (writer, metadata, _), central, local, alike, _ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(by_key),
            _Writer(folder, thread_count=FILES_PER_RANK),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            cached_ckpt_structure=self._known,
        )
        self._known = (central, local, alike)
        self._metadata = metadata if metadata is not None else self._metadata
        live = writer.files
        tensors = [data for items in live.values() for _, data in items if isinstance(data, Tensor)]
        writer.files = {}
        files = {
            name: [(item, None if isinstance(data, Tensor) else data) for item, data in items]
            for name, items in live.items()
        }
        return Plan(files, common, writer, self._metadata), tensors
