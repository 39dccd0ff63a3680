"""Launch that takes the mean key of each chunk."""

import torch
from torch import Tensor

from kernels.top1_chunk import triton_select
from kernels.top1_chunk.triton_problem import Problem


def mean_keys(problem: Problem, k: Tensor) -> Tensor:
    """Mean key of every slot: [slots, hkv, d] in k's dtype."""
    means = torch.empty(problem.slots, problem.num_groups, problem.head_dim, dtype=k.dtype, device=k.device)
    tiles, size = problem.tiles("mean"), problem.layout.chunk_size
    triton_select.mean_keys[problem.slots, problem.num_groups](
        k, means, problem.table, CHUNK=size, BLOCK_N=min(size, tiles.block_n),
        num_warps=tiles.num_warps, **problem.shape,
    )  # fmt: skip
    return means
