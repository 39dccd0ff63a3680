"""Public interface of Native Sparse Attention: argument checks and choice of an implementation."""

from typing import Literal

from torch import Tensor

from kernels.common.dispatch import (
    Choice,
    check_any_floating,
    check_attention,
    check_positive_int,
    check_shapes,
    choose,
    choose_triton_or_reference,
    full_precision,
    resolve_scale,
    triton_attention_unsupported_reason,
)
from kernels.native_sparse_attention.branches import native_sparse_attention_triton
from kernels.native_sparse_attention.reference import native_sparse_attention_reference
from kernels.softmax_attention.flex import flex_unsupported_reason
from kernels.softmax_attention.interface import FEW_QUERIES
from kernels.top1_chunk.interface import MAX_TOP_K, TRITON_CHUNK_SIZES

Implementation = Literal["auto", "reference", "triton"]
_IMPLEMENTATIONS = {"reference": native_sparse_attention_reference, "triton": native_sparse_attention_triton}

MAX_SELECTED = MAX_TOP_K + 1


def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    *,
    block_size: int = 64,
    num_selected: int = 16,
    window: int = 512,
    scale: float | None = None,
    query_offset: int = 0,
    implementation: Implementation = "auto",
) -> Tensor:
    """Native Sparse Attention: gated sum of attention to compressed blocks, to selected blocks and to a sliding window.

    Block c is the keys c * block_size .. (c + 1) * block_size - 1. A query's own block contains its position. All
    branches are computed in fp32 (float64 for float64).

    Compressed: softmax attention to the mean key and mean value of every complete block that ends at or before the
    query; 0 for a query without such a block. A block's importance is its probability here, summed over the group's
    query heads.
    Selected: one softmax over the keys, up to the query, of num_selected blocks: the query's own block, the one before
    it, block 0, and the most important other blocks before it. The lower block wins a tie. A query with fewer blocks
    selects them all.
    Window: softmax attention to the last `window` keys up to the query.

    The selection has no gradient; q, k, v and the gates get gradients through the three softmaxes.

    Args:
        q: queries [b, tq, hq, d]; fp32, bf16, fp16 or float64.
        k: keys [b, tk, hkv, d], hq a multiple of hkv. Query head h uses key head h // (hq // hkv). The query heads that
            share a key head form a group and share their selection.
        v: values [b, tk, hkv, dv].
        gates: factors of compressed, selected and window branch [b, tq, hq, 3], in (0, 1); any floating dtype.
        block_size: keys per block; tk need not be a multiple.
        num_selected: blocks per query, including its own, the one before and block 0; less than 3 is taken as 3.
        window: query t sees keys t - window + 1 .. t in the window branch.
        scale: positive factor on q.k; None means d**-0.5.
        query_offset: global position of the first query; keys are at 0 .. tk-1.
        implementation: "reference"; "triton", which never materialises [tq, tk]; or "auto" for Triton where it is
            supported and there are at least `FEW_QUERIES` queries. Triton needs d = dv of 16 to 256, a block_size of 32
            to 512 and num_selected up to 17, and rounds block means to the inputs' dtype.

    Returns:
        [b, tq, hq, dv] in v's dtype.

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Yuan et al. 2025 (arXiv 2502.11089), equations 5 and 7 to 12, with one block size for compression and
    selection. The paper learns the compression and has separate keys and values per branch. As in
    flash-linear-attention, compression is the block mean, and the branches share keys and values.
    """
    check_attention(q, k, v, query_offset)
    check_shapes(q, {"gates": (gates, (*q.shape[:3], 3))})
    check_any_floating(gates=gates)
    for name, value in (("block_size", block_size), ("num_selected", num_selected), ("window", window)):
        check_positive_int(name, value)
    chosen = _choice(implementation, q, v, block_size, num_selected)
    with full_precision(q):
        return _IMPLEMENTATIONS[chosen.name](
            q,
            k,
            v,
            gates,
            block_size=block_size,
            num_selected=num_selected,
            window=window,
            scale=resolve_scale(scale, q.shape[3] ** -0.5),
            query_offset=query_offset,
        )


def _choice(implementation: str, q: Tensor, v: Tensor, block_size: int, num_selected: int) -> Choice:
    if implementation == "auto" and q.shape[1] < FEW_QUERIES:
        # FlexAttention would recompile for each decoded token.
        few = Choice("reference", f"only {q.shape[1]} queries")
        return choose("native_sparse_attention", implementation, _IMPLEMENTATIONS, few, "reference")
    unsupported_reason = _unsupported_reason(q, v, block_size, num_selected)
    return choose_triton_or_reference("native_sparse_attention", implementation, q, unsupported_reason)


def _unsupported_reason(q: Tensor, v: Tensor, block_size: int, num_selected: int) -> str | None:
    if block_size not in TRITON_CHUNK_SIZES:
        return f"block_size is {block_size}: give one of {list(TRITON_CHUNK_SIZES)}"
    if num_selected > MAX_SELECTED:
        return f"num_selected is {num_selected}: give at most {MAX_SELECTED}"
    return triton_attention_unsupported_reason(q, v) or flex_unsupported_reason(q, v)
