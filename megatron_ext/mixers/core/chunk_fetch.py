"""Top-1 Chunk under context parallelism: each rank chooses chunks for its own queries and fetches only those.

Each rank holds a shard of whole chunks. Keys and values that none of a rank's queries chose are not transferred.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.top1_chunk import best_by_keys, best_by_mean, mean_keys, merge
from megatron_ext.parallel.exchange import gather_sequence
from megatron_ext.parallel.fetch import fetch_blocks
from megatron_ext.parallel.line import ring_pass


def choose_over_ranks(
    q_bthd: Tensor, k_bthd: Tensor, *, chunk_size: int, top_k: int, score: str, group: ProcessGroup
) -> Tensor:
    """Choose each query's best earlier chunks of the whole sequence.

    For `approx` the ranks gather every chunk's mean key. For `exact` and `exact_lse` the keys of each shard are passed
    from rank to rank, and each query keeps its best chunks so far.

    Args:
        q_bthd: queries of this rank's shard [b, t, hq, d].
        k_bthd: keys of this rank's shard [b, t, groups, d].
        chunk_size: keys per chunk; divides t.
        top_k: number of chunks to choose.
        score: as in `top1_chunk_attention`.
        group: context-parallel group; rank r holds shard r.

    Returns:
        Chunk indices in the whole sequence, int64 [b, t, hq, top_k], best first, -1 where there is none.
    """
    t, rank = q_bthd.shape[1], group.rank()
    if score == "approx":
        own_nbgd = mean_keys(k_bthd, chunk_size).transpose(0, 1)
        means = gather_sequence(own_nbgd, group).transpose(0, 1)
        return best_by_mean(q_bthd, means, chunk_size=chunk_size, top_k=top_k, query_offset=rank * t)
    options: dict[str, Any] = {"chunk_size": chunk_size, "top_k": top_k, "score": score, "query_offset": rank * t}
    found = (best_by_keys(q_bthd, k, first_chunk=r * t // chunk_size, **options) for r, k in ring_pass(k_bthd, group))
    return reduce(merge, found).chunks


def fetch_chosen(
    k_bthd: Tensor, v_bthd: Tensor, chosen_bthm: Tensor, *, chunk_size: int, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Fetch the chunks that any query of a group chose, and append this rank's own keys and values.

    Args:
        k_bthd: keys of this rank's shard [b, t, groups, d].
        v_bthd: values of this rank's shard, of the same width.
        chosen_bthm: result of `choose_over_ranks`.
        chunk_size: keys per chunk.
        group: context-parallel group.

    Returns:
        Keys and values [b, s, groups, d], and the choice as indices of their chunks. The fetched chunks are in the
        order of the sequence. Query groups that fetch fewer than others are padded with zeros, which no query chose.
    """
    count = k_bthd.shape[1] // chunk_size
    needed_bgn = _needed_from_other_ranks(chosen_bthm, k_bthd.shape[2], count, group)
    blocks_bgncw = torch.cat([k_bthd, v_bthd], -1).unflatten(1, (count, chunk_size)).permute(0, 3, 1, 2, 4)
    needed_rbgn = needed_bgn.unflatten(-1, (group.size(), count)).permute(2, 0, 1, 3)
    fetched_mcw = fetch_blocks(blocks_bgncw.flatten(0, 2), needed_rbgn.flatten(1), group)

    position_bgn = needed_bgn.cumsum(-1) - 1
    padded_bgmcw = _pad_by_group(fetched_mcw, needed_rbgn, position_bgn)
    k_bsgd, v_bsgd = padded_bgmcw.permute(0, 2, 3, 1, 4).flatten(1, 2).chunk(2, -1)
    # This rank's own chunks follow the fetched ones.
    own_n = torch.arange(needed_bgn.shape[-1], device=k_bthd.device) - group.rank() * count + padded_bgmcw.shape[2]
    selection = _renumber(chosen_bthm, torch.where(needed_bgn, position_bgn, own_n))
    return torch.cat([k_bsgd, k_bthd], 1), torch.cat([v_bsgd, v_bthd], 1), selection


def _pad_by_group(fetched_mcw: Tensor, needed_rbgn: Tensor, position_bgn: Tensor) -> Tensor:
    """Arrange fetched chunks by sample and group, padded with zeros: [b, groups, most chunks, chunk_size, w]."""
    r, b, g, n = needed_rbgn.nonzero(as_tuple=True)
    shape = (*position_bgn.shape[:2], int(position_bgn.max()) + 1, *fetched_mcw.shape[1:])
    indices = (b, g, position_bgn[b, g, r * needed_rbgn.shape[-1] + n])
    return fetched_mcw.new_zeros(shape).index_put(indices, fetched_mcw)


def _needed_from_other_ranks(chosen_bthm: Tensor, num_groups: int, count: int, group: ProcessGroup) -> Tensor:
    """Mark the chunks of other ranks (`count` per rank) that any query of a group chose: bool [b, groups, chunks]."""
    chosen_bgx = _by_group(chosen_bthm, num_groups)
    num_chunks, first_own = group.size() * count, group.rank() * count
    # The extra column takes the entries of -1.
    needed = torch.zeros(*chosen_bgx.shape[:2], num_chunks + 1, dtype=torch.bool, device=chosen_bgx.device)
    needed.scatter_(-1, chosen_bgx.where(chosen_bgx >= 0, num_chunks), True)
    needed[..., first_own : first_own + count] = False
    return needed[..., :num_chunks]


def _renumber(chosen_bthm: Tensor, index_bgn: Tensor) -> Tensor:
    """Map a choice [b, t, hq, top_k] through `index_bgn`, an index per group and chunk; -1 stays -1."""
    b, t, hq, top_k = chosen_bthm.shape
    chosen_bgx = _by_group(chosen_bthm, index_bgn.shape[1])
    renumbered_bgx = torch.where(chosen_bgx >= 0, index_bgn.gather(-1, chosen_bgx.clamp(min=0)), -1)
    return renumbered_bgx.view(b, -1, t, hq // index_bgn.shape[1], top_k).transpose(1, 2).reshape(b, t, hq, top_k)


def _by_group(x_bthm: Tensor, num_groups: int) -> Tensor:
    """Regroup [b, t, hq, top_k] to [b, groups, t * heads of a group * top_k]."""
    return x_bthm.unflatten(2, (num_groups, -1)).transpose(1, 2).flatten(2)
