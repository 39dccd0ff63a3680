"""Other implementations as contestants, in the layout in which our models hold q, k and v."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.bench import costs
from kernels.bench.cases import Shape
from kernels.bench.contestant import Contestant, NotRun, TimedPart
from kernels.common.attention_math import causal_mask, query_positions
from kernels.softmax_attention.flex import visible_blocks
from kernels.softmax_attention.reference import attend
from kernels.top1_chunk.reference import selection_mask

NSA_BLOCK_SIZE = 64
NSA_NUM_SELECTED = 16
"""Block size and blocks per query, as in the paper (arXiv 2502.11089) and in fla."""
NSA_MIN_HEADS_PER_GROUP = 16
"""Query heads per key head: fla requires a power of two that is at least this."""


def sdpa(shape: Shape, *, backend: SDPBackend) -> Contestant:
    """Build full causal attention by torch.nn.functional.scaled_dot_product_attention with one backend."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                is_causal=True, enable_gqa=shape.heads != shape.groups,
            )  # fmt: skip
        return out.transpose(1, 2)

    return Contestant(run=run, parts=(_softmax_part(run, None),), operations=costs.causal_attention(shape))


def flex_window(shape: Shape, *, window: int, compiled: bool = True) -> Contestant:
    """Build attention to the last `window` keys by torch's FlexAttention, compiled for this shape.

    Args:
        shape: the problem.
        window: keys per query.
        compiled: False for FlexAttention's eager mode, which materialises all scores (for tests).
    """
    device = torch.device("cuda" if compiled else "cpu")
    mask = visible_blocks(shape.length, shape.length, window, 0, device)
    if compiled:
        # Compiled code is cached per function, and after a few shapes torch would fall back to eager mode.
        torch.compiler.reset()
    attention: Any = flex_attention.flex_attention
    attention = torch.compile(attention, dynamic=False) if compiled else attention

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bhtd = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = attention(*bhtd, block_mask=mask, enable_gqa=shape.heads != shape.groups)
        return out.transpose(1, 2)

    return Contestant(run=run, parts=(_softmax_part(run, window),), operations=costs.window_attention(shape, window))


def nsa(shape: Shape) -> Contestant:
    """Build Native Sparse Attention by fla: compression, selection of 16 blocks of 64, attention to them; no window.

    The selection has no reference here. The checks cover attention to given blocks, and the compressed part alone.
    """
    ratio = shape.heads // shape.groups
    if find_spec("fla") is None:
        raise NotRun("fla is not installed")
    if ratio < NSA_MIN_HEADS_PER_GROUP or ratio & (ratio - 1):
        raise NotRun(f"fla's NSA needs 16, 32, ... query heads per key head, not {ratio}: set --groups")
    parallel_nsa = import_module("fla.ops.nsa").parallel_nsa
    options = {"block_counts": NSA_NUM_SELECTED, "block_size": NSA_BLOCK_SIZE}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gate = torch.ones(q.shape[:3], dtype=q.dtype, device=q.device)
        return _tensor(parallel_nsa(q, k, v, g_cmp=gate, g_slc=gate, **options))

    def attend_to_given(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        blocks = spread_blocks(q, k)
        out = parallel_nsa(q, k, v, block_indices=blocks, **options)
        return _tensor(out), blocks

    def compress(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        ones, zeros = (torch.full(q.shape[:3], gate, dtype=q.dtype, device=q.device) for gate in (1.0, 0.0))
        out = parallel_nsa(q, k, v, g_cmp=ones, g_slc=zeros, **options)
        return _tensor(out), None

    parts = (
        TimedPart(run=attend_to_given, reference=_attend_to_blocks, name="attention to given blocks"),
        TimedPart(run=compress, reference=_attend_to_means, name="compressed attention"),
    )
    operations = costs.native_sparse_attention(shape, NSA_BLOCK_SIZE, NSA_NUM_SELECTED)
    return Contestant(run=run, parts=parts, operations=operations)


def spread_blocks(q: Tensor, k: Tensor) -> Tensor:
    """Select for every query and key head its own block and 15 earlier ones with a random constant step, -1 if missing.

    Returns:
        int64 [b, t, hkv, 16].
    """
    own_t1 = (query_positions(q, 0) // NSA_BLOCK_SIZE)[:, None]
    size = (q.shape[0], q.shape[1], k.shape[2])
    step_btg = 1 + (torch.rand(size, device=q.device) * ((own_t1 + 1) // NSA_NUM_SELECTED).clamp(min=1)).long()
    blocks = own_t1[..., None] - torch.arange(NSA_NUM_SELECTED, device=q.device) * step_btg[..., None]
    return blocks.clamp(min=-1)


def _tensor(out: Any) -> Tensor:
    """Return fla's result as a tensor. Some ops of fla return a pair, which would fail here."""
    assert isinstance(out, Tensor)
    return out


def _softmax_part(run: Callable[[Tensor, Tensor, Tensor], Tensor], window: int | None) -> TimedPart:
    def run_without_choices(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        return run(q, k, v), None

    def reference(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, query_offset: int) -> Tensor:
        return attend(q, k, v, causal_mask(q, k, query_offset, window), q.shape[3] ** -0.5)

    return TimedPart(run=run_without_choices, reference=reference)


def _attend_to_blocks(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor | None, query_offset: int) -> Tensor:
    assert blocks is not None
    chosen = blocks.repeat_interleave(q.shape[2] // blocks.shape[2], dim=2)
    taken = selection_mask(chosen, q, k, chunk_size=NSA_BLOCK_SIZE, local=True, query_offset=query_offset)
    # The own block is among the selected ones, but visible only up to the query.
    return attend(q, k, v, taken & causal_mask(q, k, query_offset), q.shape[3] ** -0.5)


def _attend_to_means(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, query_offset: int) -> Tensor:
    """Attend to the means of the blocks that end at or before the query; zero without such a block."""
    complete = k.shape[1] // NSA_BLOCK_SIZE
    if complete == 0:
        return torch.zeros_like(q) + 0 * (k.sum() + v.sum())
    k_mean, v_mean = (
        x[:, : complete * NSA_BLOCK_SIZE].unflatten(1, (complete, NSA_BLOCK_SIZE)).mean(2) for x in (k, v)
    )
    end_n = torch.arange(1, complete + 1, device=q.device) * NSA_BLOCK_SIZE
    visible_tn = end_n <= query_positions(q, query_offset)[:, None] + 1
    has_block_t = visible_tn.any(1)
    out = attend(q, k_mean, v_mean, visible_tn | ~has_block_t[:, None], q.shape[3] ** -0.5)
    return torch.where(has_block_t[:, None, None], out, 0.0)
