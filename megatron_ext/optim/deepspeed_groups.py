"""DeepSpeed on top of torch's process group and Megatron's process groups."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.ops import __compatible_ops__
from megatron.core.process_groups_config import ProcessGroupCollection


def join_process_group(communication: str) -> None:
    """Make DeepSpeed use the existing process group.

    Args:
        communication: backend of torch.distributed.
    """
    # Otherwise DeepSpeed would compile its shared-memory collectives on a CPU, which training does not use.
    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=communication, dist_init_required=False)


class GroupsForDeepSpeed:
    """DeepSpeed's `mpu` argument: an object with the functions of Megatron's former module `mpu`.

    Its data-parallel group is DP x CP, over which parameters are replicated. Its model-parallel group is TP x PP. It
    has no function whose name contains `sequence_parallel`, because DeepSpeed would then assume its own sequence
    parallelism.

    Args:
        groups: process groups of this rank.
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
