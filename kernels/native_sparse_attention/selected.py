"""Attention to selected blocks: masked attention over all keys if most blocks are selected, otherwise sparse."""

from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kernels.common.fusion import compiled
from kernels.common.tensor_cache import cached_tensors
from kernels.softmax_attention.flex import kernel_options, mask_of_blocks, tile_bounds
from kernels.top1_chunk import top1_chunk_attention

MAX_MASKED_RATIO = 2
"""Use masked attention if there are at most this many times as many blocks as are selected."""

MAX_BITS = 63
"""Maximum number of blocks in a query's bit mask."""


def attend_selected(
    q_bthd: Tensor,
    k_bshd: Tensor,
    v_bshd: Tensor,
    earlier_btgm: Tensor,
    *,
    block_size: int,
    scale: float,
    query_offset: int,
) -> Tensor:
    """Attend to the query's own block, up to its position, and to the selected blocks before it: [b, tq, hq, d].

    Args:
        q_bthd: queries [b, tq, hq, d].
        k_bshd: keys [b, tk, hkv, d].
        v_bshd: values [b, tk, hkv, d].
        earlier_btgm: output of `choose_blocks`, int64 [b, tq, hkv, blocks], padded with -1 at the end.
        block_size: keys per block.
        scale: factor on q.k.
        query_offset: global position of the first query.
    """
    num_blocks, num_earlier = -(-k_bshd.shape[1] // block_size), earlier_btgm.shape[3]
    if num_blocks <= min(MAX_BITS, MAX_MASKED_RATIO * (num_earlier + 1)):
        bits_bgt = selection_bits(earlier_btgm, block_size, query_offset)
        return attend_masked(
            q_bthd, k_bshd, v_bshd, bits_bgt, block_size=block_size, scale=scale, query_offset=query_offset
        )
    earlier_bthm = earlier_btgm.repeat_interleave(q_bthd.shape[2] // k_bshd.shape[2], dim=2)
    out, _ = top1_chunk_attention(
        q_bthd, k_bshd, v_bshd,
        chunk_size=block_size, top_k=num_earlier, selection=earlier_bthm, scale=scale, query_offset=query_offset,
        implementation="triton",
    )  # fmt: skip
    return out


def selection_bits(earlier_btgm: Tensor, block_size: int, query_offset: int) -> Tensor:
    """Return int64 bit masks [b, hkv, tq]: bit n is set if block n is selected or the query's own."""
    own_t = (query_offset + torch.arange(earlier_btgm.shape[1], device=earlier_btgm.device)) // block_size
    bits_btgm = torch.where(earlier_btgm >= 0, 1 << earlier_btgm.clamp(min=0), 0)
    return (bits_btgm.sum(-1) + (1 << own_t)[:, None]).transpose(1, 2).contiguous()


def attend_masked(
    q_bthd: Tensor,
    k_bshd: Tensor,
    v_bshd: Tensor,
    bits_bgt: Tensor,
    *,
    block_size: int,
    scale: float,
    query_offset: int,
) -> Tensor:
    """Compute `attend_selected` from `selection_bits`, with FlexAttention over all keys up to the query.

    On a CPU, FlexAttention runs in eager mode, materialises all scores and has no gradient.
    """
    group = q_bthd.shape[2] // k_bshd.shape[2]

    def selected(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (s <= t + query_offset) & (((bits_bgt[b, h // group, t] >> (s // block_size)) & 1) == 1)

    attend = compiled(_attend, q_bthd, later_dynamic=None, fullgraph=True)
    mask = copy(_causal_tiles(q_bthd.shape[1], k_bshd.shape[1], query_offset, q_bthd.device))
    mask.mask_mod = selected
    out_bhtd: Tensor = attend(*(x.transpose(1, 2) for x in (q_bthd, k_bshd, v_bshd)), mask=mask, scale=scale)
    return out_bhtd.transpose(1, 2)


# A separate function: torch limits recompilations per function, and those of other branches would count as well.
def _attend(q_bhtd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, *, mask: BlockMask, scale: float) -> Any:
    group = q_bhtd.shape[1] // k_bhsd.shape[1]
    options = kernel_options(q_bhtd.shape[2], group)
    return flex_attention(
        q_bhtd, k_bhsd, v_bhsd, block_mask=mask, scale=scale, enable_gqa=group > 1, kernel_options=options
    )


@cached_tensors(16)
def _causal_tiles(num_queries: int, num_keys: int, query_offset: int, device: torch.device) -> BlockMask:
    """Return a mask of all tiles with a causal key. The caller sets its `mask_mod`, which every tile applies."""
    first_key, _, end_query = tile_bounds(num_queries, num_keys, query_offset, device)
    is_visible = first_key < end_query

    def unset_mask(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        raise AssertionError("the mask of the selected blocks was not set")

    return mask_of_blocks(is_visible, torch.zeros_like(is_visible), unset_mask, num_queries, num_keys)
