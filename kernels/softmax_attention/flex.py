"""Causal softmax attention with torch's FlexAttention: windows, slopes and offsets without a full mask.

Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention Kernels" (arXiv 2412.05496).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kernels.common.fusion import compiled
from kernels.common.tensor_cache import cached_tensors

BLOCK = 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = range(16, 257)


def flex_unsupported_reason(q_bthd: Tensor, v_bshe: Tensor) -> str | None:
    """Return the reason why FlexAttention does not support these inputs, and the fix; None if it does."""
    if q_bthd.dtype not in DTYPES:
        return f"q has dtype {q_bthd.dtype}: convert it to one of {[str(dtype) for dtype in DTYPES]}"
    for name, x in (("q", q_bthd), ("v", v_bshe)):
        if x.shape[3] not in HEAD_DIMS:
            return f"{name} has head_dim {x.shape[3]}: give {HEAD_DIMS.start} to {HEAD_DIMS.stop - 1}"
    return None


def softmax_attention_flex(
    q_bthd: Tensor,
    k_bshd: Tensor,
    v_bshe: Tensor,
    *,
    scale: float,
    window: int | None,
    alibi_slopes: Tensor | None,
    query_offset: int,
) -> Tensor:
    """Compute attention with FlexAttention, compiled on a GPU. Arguments as in `softmax_attention`, checked there.

    A new length, window or offset triggers recompilation. On a CPU, FlexAttention runs in eager mode, materialises all
    scores and has no gradient.
    """
    # Require a full graph: in eager mode FlexAttention materialises the scores of all pairs.
    attention = compiled(flex_attention, q_bthd, later_dynamic=None, fullgraph=True)
    mask = visible_blocks(q_bthd.shape[1], k_bshd.shape[1], window, query_offset, q_bthd.device)
    slopes = None if alibi_slopes is None else alibi_slopes.float()

    def with_bias(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        assert slopes is not None
        return score - slopes[h] * (t + query_offset - s)

    out_bhte: Tensor = attention(
        *(x.transpose(1, 2) for x in (q_bthd, k_bshd, v_bshe)),
        score_mod=None if slopes is None else with_bias,
        block_mask=mask,
        scale=scale,
        enable_gqa=q_bthd.shape[2] != k_bshd.shape[2],
        kernel_options=kernel_options(q_bthd.shape[1], q_bthd.shape[2] // k_bshd.shape[2]),
    )
    return out_bhte.transpose(1, 2)


def kernel_options(num_queries: int, group: int) -> Any:
    """Return FlexAttention's kernel options. torch's decoding kernel finds no tile for more than BLOCK rows, and fails.

    Args:
        num_queries: tq.
        group: query heads per key head, whose rows the decoding kernel has in one tile.
    """
    return {"BACKEND": "TRITON"} if num_queries * group > BLOCK else None


@cached_tensors(16)
def visible_blocks(
    num_queries: int, num_keys: int, window: int | None, query_offset: int, device: torch.device
) -> BlockMask:
    """Return FlexAttention's mask of a causal window, without the array of all pairs that `create_block_mask` builds.

    Args:
        num_queries: tq.
        num_keys: tk.
        window: query t sees keys t - window + 1 .. t; None for 0 .. t.
        query_offset: position of the first query; keys are at 0 .. tk-1.
        device: device of the mask.
    """
    effective_window = query_offset + num_queries if window is None else window

    def visible(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (s <= t + query_offset) & (s > t + query_offset - effective_window)

    first_key, first_query, end_query = tile_bounds(num_queries, num_keys, query_offset, device)
    last_key, last_query = first_key + BLOCK - 1, end_query - 1
    is_visible = (first_key <= last_query) & (last_key > first_query - effective_window)
    # An incomplete block is not a full block: like torch, let the mask exclude the missing queries and keys.
    is_full = (
        (last_key <= first_query) & (first_key > last_query - effective_window) & (first_query + BLOCK == end_query)
    )
    return mask_of_blocks(is_visible, is_full, visible, num_queries, num_keys)


def tile_bounds(
    num_queries: int, num_keys: int, query_offset: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bounds of a mask's tiles: first keys [j], and positions [i, 1] of first queries and of queries' ends.

    Arguments as in `visible_blocks`.
    """
    first_key = torch.arange(-(-num_keys // BLOCK), device=device) * BLOCK
    first_query = torch.arange(-(-num_queries // BLOCK), device=device)[:, None] * BLOCK
    end_query = (first_query + BLOCK).clamp(max=num_queries)
    return first_key, query_offset + first_query, query_offset + end_query


def mask_of_blocks(
    is_visible_ij: Tensor, is_full_ij: Tensor, visible: Any, num_queries: int, num_keys: int
) -> BlockMask:
    """Build FlexAttention's mask from properties of its blocks of BLOCK queries and keys.

    Args:
        is_visible_ij: bool, True if any query of the block sees any of its keys.
        is_full_ij: bool, True if all queries see all keys and the block is complete.
        visible: torch's mask_mod, applied in blocks that are visible but not full.
        num_queries: tq.
        num_keys: tk.
    """
    return BlockMask.from_kv_blocks(
        *_block_lists(is_visible_ij & ~is_full_ij), *_block_lists(is_full_ij),
        BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(num_queries, num_keys),
    )  # fmt: skip


def _block_lists(taken_ij: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a mask of blocks to FlexAttention's format: blocks per row, and block indices, selected ones first."""
    order = taken_ij.int().argsort(dim=1, descending=True, stable=True)
    return taken_ij.sum(1).int()[None, None], order.int()[None, None]
