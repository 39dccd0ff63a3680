"""Launches that select chunks."""

import torch
from torch import Tensor

from kernels.common.triton_math import next_power_of_two
from kernels.top1_chunk import triton_select
from kernels.top1_chunk.triton_launch_screening import screening_pays, select_screened
from kernels.top1_chunk.triton_problem import LN2, Problem


def choose(problem: Problem, q: Tensor, k: Tensor, chosen: Tensor, score: str, scratch: Tensor) -> None:
    """Select chunks by `score` and write their slots to `chosen`, int32 [top_k, hkv, rows].

    Slots are sorted best first; -1 is a missing chunk. `scratch` is a contiguous buffer of at least q's size, which is
    overwritten.
    """
    if score == "approx":
        select_by_mean(problem, q, mean_keys(problem, k), chosen)
    elif score == "exact" and screening_pays(problem, len(chosen)):
        select_screened(problem, q, k, chosen, scratch)
    else:
        select_by_keys(problem, q, k, chosen, lse=score == "exact_lse")


def select_by_mean(problem: Problem, q: Tensor, means: Tensor, chosen: Tensor) -> None:
    """Select chunks by the scores of their mean keys, and write `chosen` as in `choose`."""
    tiles = problem.tiles("select_mean")
    row_tiles = problem.row_tiles(tiles.block_m)
    triton_select.select_by_mean[problem.slots * row_tiles, problem.num_groups](
        q, means, chosen, problem.table, problem.rows, problem.slots,
        R=problem.heads_per_group, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, TILES=row_tiles, TOP_K=len(chosen),
        LIST_SIZE=next_power_of_two(len(chosen)), **tiles.launch(), **problem.shape,
    )  # fmt: skip


def mean_keys(problem: Problem, k: Tensor) -> Tensor:
    """Return the mean key of every slot: [slots, hkv, d] in k's dtype."""
    means = torch.empty(problem.slots, problem.num_groups, problem.head_dim, dtype=k.dtype, device=k.device)
    tiles, size = problem.tiles("mean"), problem.layout.chunk_size
    triton_select.mean_keys[problem.slots, problem.num_groups](
        k, means, problem.table, CHUNK=size, BLOCK_N=min(size, tiles.block_n),
        num_warps=tiles.num_warps, **problem.shape,
    )  # fmt: skip
    return means


def select_by_keys(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    chosen: Tensor,
    *,
    lse: bool,
    limit: int | None = None,
    scores: Tensor | None = None,
) -> None:
    """Select among each document's first `limit` chunks by the scores of their keys, and write `chosen` as in `choose`.

    The scores of the selected chunks are written to `scores`, fp32 like `chosen` in shape, if given.
    """
    tiles = problem.tiles("select_keys")
    row_tiles = problem.row_tiles(tiles.block_m)
    size = problem.layout.chunk_size
    short = size < tiles.block_n
    kernel = triton_select.select_by_keys_of_short_chunks if short else triton_select.select_by_keys
    kernel[problem.slots * row_tiles, problem.num_groups](
        q, k, chosen, chosen if scores is None else scores, problem.table, problem.rows, problem.slots,
        problem.slots if limit is None else limit, problem.scale / LN2,
        R=problem.heads_per_group, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, CHUNK=size, TILES=row_tiles,
        TOP_K=len(chosen), LIST_SIZE=next_power_of_two(len(chosen)), LSE=lse, SCORES=scores is not None,
        **tiles.launch(), **problem.shape,
    )  # fmt: skip
