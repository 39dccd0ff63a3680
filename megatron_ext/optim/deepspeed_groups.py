"""Megatron's process groups as DeepSpeed asks for them: an object with the functions of Megatron's old `mpu` module."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection


class GroupsForDeepSpeed:
    """What DeepSpeed calls `mpu`.

    Its data-parallel group is DP x CP, over which parameters are replicated; its model-parallel group is TP x PP. It
    has no function with `sequence_parallel` in its name: with one, DeepSpeed takes its own sequence parallelism for
    granted.

    Args:
        groups: of this rank.
    """

    def __init__(self, groups: ProcessGroupCollection) -> None:
        for name, group in {
            "data_parallel": groups.dp_cp,
            "model_parallel": groups.mp,
            "tensor_model_parallel": groups.tp,
            "pipeline_model_parallel": groups.pp,
        }.items():
            setattr(self, f"get_{name}_group", _always(group))
            setattr(self, f"get_{name}_rank", _always(group.rank()))
            setattr(self, f"get_{name}_world_size", _always(group.size()))
        ranks = dist.get_process_group_ranks(groups.tp)
        self.get_tensor_model_parallel_src_rank = _always(ranks[0])
        self.get_data_parallel_group_ranks = _always(dist.get_process_group_ranks(groups.dp_cp))


def _always(value: Any) -> Any:
    return lambda: value
