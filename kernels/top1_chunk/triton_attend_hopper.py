"""Both kernels of `triton_forward` for Hopper, in Gluon, Triton's language of explicit layouts and warps.

Each multiprocessor runs one persistent, warp-specialised block. Four warps load the queries, keys and values of the
next tile while two warp groups compute attention, so that loads overlap with products and exponentials. A chunk's keys
are one tile, so the softmax takes a single pass.
"""

# mypy: ignore-errors
# Triton compiles what is below; pointers and tiles have no type in Python.

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.common.triton_hopper import GROUP_M, shared_layout, tile_descriptor
from kernels.common.triton_math import multiprocessors
from kernels.top1_chunk import triton_attend
from kernels.top1_chunk.triton_attend import COLUMNS
from kernels.top1_chunk.triton_group import ITEM_COLUMNS
from kernels.top1_chunk.triton_problem import LN2, Problem

BLOCK_M = gl.constexpr(128)
"""Rows per tile."""

GROUP_REGISTERS, LOADER_REGISTERS = gl.constexpr(224), gl.constexpr(56)
"""Registers per thread of the warp groups that compute, and of the warps that load. The total for all threads must fit
in the multiprocessor's register file."""

SHARED_BYTES = 192 * 1024
"""Bytes of shared memory for queries, keys and values."""

head_rows = gluon.jit(triton_attend.head_rows.fn)
shares = gluon.jit(triton_attend.shares.fn)


@gluon.jit
def _tile(i, work, num_tiles, G: gl.constexpr, R: gl.constexpr, TILES: gl.constexpr, LOCAL: gl.constexpr):
    """Return the position of tile i. With LOCAL, the heads of one chunk are consecutive, as in memory.

    Returns:
        (exists, begin, end, key head, first key of the chunk, row that a query at the chunk's first position would
        have). Begin and end are rows with LOCAL, else indices in the order.
    """
    if LOCAL:
        slot = i // G // TILES
        entry = work + slot * COLUMNS
        exists = i < num_tiles
        start = gl.load(entry + 2, mask=exists, other=0) * R
        begin = start + i // G % TILES * BLOCK_M
        end = start + gl.load(entry + 3, mask=exists, other=0) * R
        key = gl.load(entry, mask=exists, other=0)
        return exists, begin, end, i % G, key, start - gl.load(entry + 4, mask=exists, other=0) * R
    else:
        item = work + i * ITEM_COLUMNS
        inside = i < num_tiles
        begin, end = gl.load(item, mask=inside, other=0), gl.load(item + 1, mask=inside, other=0)
        g, key = gl.load(item + 2, mask=inside, other=0), gl.load(item + 3, mask=inside, other=0)
        return begin < end, begin, end, g, key, 0


@gluon.jit
def _rows(m, end, order, LOCAL: gl.constexpr):
    if LOCAL:
        return m
    else:
        return gl.load(order + m, mask=m < end, other=0)


@gluon.jit
def _load(
    k_tiles, v_tiles, q, shared, order, work, num_tiles,
    G: gl.constexpr, R: gl.constexpr, HEAD_DIM: gl.constexpr, TILES: gl.constexpr, LOCAL: gl.constexpr,
    ROWS_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load each tile's queries, keys and values as soon as the warp groups have released the stage's buffers."""
    queries, keys, values, queries_ready, keys_ready, values_ready, free = shared
    STAGES: gl.constexpr = keys.shape[0]
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROWS_LAYOUT))
    d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    i, n = gl.program_id(0), 0
    exists, begin, end, g, key, _ = _tile(i, work, num_tiles, G, R, TILES, LOCAL)
    row = _rows(begin + m, end, order, LOCAL)
    while exists:
        stage = n % STAGES
        mbarrier.wait(free.index(stage), (n // STAGES & 1) ^ 1)
        mbarrier.expect(keys_ready.index(stage), k_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(k_tiles, [key, g * HEAD_DIM], keys_ready.index(stage), keys.index(stage))
        pointers = q + head_rows(row, g, G, R)[:, None] * HEAD_DIM + d[None, :]
        async_copy.async_copy_global_to_shared(queries.index(stage), pointers, mask=(begin + m < end)[:, None])
        async_copy.mbarrier_arrive(queries_ready.index(stage), increment_count=False)
        mbarrier.expect(values_ready.index(stage), v_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(v_tiles, [key, g * HEAD_DIM], values_ready.index(stage), values.index(stage))
        i += gl.num_programs(0)
        n += 1
        exists, begin, end, g, key, _ = _tile(i, work, num_tiles, G, R, TILES, LOCAL)
        row = _rows(begin + m, end, order, LOCAL)


@gluon.jit
def _attend(
    group: gl.constexpr, inputs,
    G: gl.constexpr, R: gl.constexpr, HEAD_DIM: gl.constexpr, TILES: gl.constexpr, LOCAL: gl.constexpr,
    ROWS_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Compute attention for one warp group's rows of each tile."""
    out, lse, chosen, shared, order, work, num_tiles, rows, scale_log2 = inputs
    queries, keys, values, queries_ready, keys_ready, values_ready, free = shared
    STAGES: gl.constexpr = keys.shape[0]
    CHUNK: gl.constexpr = keys.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(CHUNK, HEAD_DIM), 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    m = group * GROUP_M + gl.arange(0, GROUP_M, layout=gl.SliceLayout(1, layout))
    m_rows = group * GROUP_M + gl.arange(0, GROUP_M, layout=gl.SliceLayout(1, ROWS_LAYOUT))
    d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    d_rows = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))
    no_scores = gl.zeros([GROUP_M, CHUNK], gl.float32, layout=layout)
    no_output = gl.zeros([GROUP_M, HEAD_DIM], gl.float32, layout=layout)
    i, n = gl.program_id(0), 0
    exists, begin, end, g, _, first_row = _tile(i, work, num_tiles, G, R, TILES, LOCAL)
    while exists:
        stage, phase = n % STAGES, n // STAGES & 1
        valid = begin + m < end
        row = _rows(begin + m, end, order, LOCAL)
        store_row = _rows(begin + m_rows, end, order, LOCAL)
        index = g.to(gl.int64) * rows + row
        if LOCAL:
            # Loaded early to hide the latency; used at the end.
            is_written = gl.load(chosen + index, mask=valid, other=-1) >= 0
            lse_before = gl.load(lse + index, mask=is_written, other=-float("inf"))
            pointers = out + head_rows(row, g, G, R)[:, None] * HEAD_DIM + d[None, :]
            old_out = gl.load(pointers, mask=is_written[:, None], other=0.0)
        group_buffer = queries.index(stage).slice(group * GROUP_M, GROUP_M)
        mbarrier.wait(queries_ready.index(stage), phase)
        group_queries = group_buffer.load(left)
        mbarrier.wait(keys_ready.index(stage), phase)
        keys_dn = keys.index(stage).permute((1, 0))
        scores = warpgroup_mma(group_queries, keys_dn, no_scores, use_acc=False, is_async=True)
        i += gl.num_programs(0)
        exists, next_begin, next_end, next_g, _, next_first = _tile(i, work, num_tiles, G, R, TILES, LOCAL)
        scores = warpgroup_mma_wait(0, deps=[scores])
        if LOCAL:
            position = (begin + m - first_row) // R
            scores = gl.where(column[None, :] <= position[:, None], scores, -float("inf"))
        lse_m = gl.max(scores, 1) * scale_log2
        # If all scores are -inf, `lse_m` is replaced, because -inf - -inf is NaN.
        weights = gl.exp2(scores * scale_log2 - gl.where(lse_m == -float("inf"), 0.0, lse_m)[:, None])
        total = gl.sum(weights, 1)
        lse_m += gl.log2(total)
        share = 1.0 / gl.where(total > 0, total, 1.0)
        weights = gl.convert_layout(weights.to(values.dtype), left)
        mbarrier.wait(values_ready.index(stage), phase)
        out_md = warpgroup_mma(weights, values.index(stage), no_output, use_acc=False, is_async=True)
        if LOCAL:
            share_before, share_own, lse_m = shares(lse_before, lse_m)
            share *= share_own
        gl.store(lse + index, lse_m, mask=valid)
        out_md = warpgroup_mma_wait(0, deps=[out_md]) * share[:, None]
        if LOCAL:
            out_md += old_out * share_before[:, None]
        # The output passes through the queries' shared memory. This changes its layout, so that whole rows are written.
        group_buffer.store(out_md.to(values.dtype))
        out_rows = group_buffer.load(ROWS_LAYOUT)
        mbarrier.arrive(free.index(stage), count=1)
        pointers = out + head_rows(store_row, g, G, R)[:, None] * HEAD_DIM + d_rows[None, :]
        gl.store(pointers, out_rows, mask=(begin + m_rows < end)[:, None])
        n += 1
        begin, end, g, first_row = next_begin, next_end, next_g, next_first


@gluon.jit
def attend_hopper(
    k_tiles, v_tiles, q, out, lse, chosen, order, work, num_tiles, rows, scale_log2,
    G: gl.constexpr, R: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
    LOCAL: gl.constexpr, QUERIES_LAYOUT: gl.constexpr, ROWS_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Implement `attend_chosen` without JOINS, or `attend_local` with LOCAL. Grid (programs,), of any size.

    Args:
        k_tiles, v_tiles: descriptors of k and v [tokens, G * HEAD_DIM] in tiles [CHUNK, HEAD_DIM].
        q, out, lse, chosen, order: as in `triton_forward`; `chosen` is used with LOCAL, `order` without.
        work: items of at most BLOCK_M rows from `cut_segments`, empty ones last; with LOCAL the chunk table.
        num_tiles: number of items; with LOCAL slots * TILES * G.
    """
    CHUNK: gl.constexpr = k_tiles.block_type.shape[0]
    queries = gl.allocate_shared_memory(k_tiles.dtype, [STAGES, BLOCK_M, HEAD_DIM], QUERIES_LAYOUT)
    keys = gl.allocate_shared_memory(k_tiles.dtype, [STAGES, CHUNK, HEAD_DIM], k_tiles.layout)
    values = gl.allocate_shared_memory(k_tiles.dtype, [STAGES, CHUNK, HEAD_DIM], v_tiles.layout)
    queries_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(queries_ready.index(stage), count=128)  # every loader thread signals its own copies
        mbarrier.init(keys_ready.index(stage), count=1)
        mbarrier.init(values_ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=BLOCK_M // GROUP_M)
    fence_async_shared()
    shared = (queries, keys, values, queries_ready, keys_ready, values_ready, free)
    inputs = (out, lse, chosen, shared, order, work, num_tiles, rows, scale_log2)
    gl.warp_specialize(
        [
            (_attend, (0, inputs, G, R, HEAD_DIM, TILES, LOCAL, ROWS_LAYOUT)),
            (_attend, (1, inputs, G, R, HEAD_DIM, TILES, LOCAL, ROWS_LAYOUT)),
            (_load, (k_tiles, v_tiles, q, shared, order, work, num_tiles, G, R, HEAD_DIM, TILES, LOCAL, ROWS_LAYOUT)),
        ],
        [4, 4],
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )


def fits(problem: Problem) -> bool:
    """Return True if these kernels support the problem's shapes."""
    size = problem.layout.chunk_size
    return problem.head_dim in (64, 128) and size in (64, 128) and problem.dtype != torch.float32


def attend_chosen(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, order: Tensor, items: Tensor
) -> None:
    """Write the attention of each row to its chosen chunk; see `triton_forward.attend_chosen`."""
    _launch(problem, q, k, v, out, lse, lse, order, items, len(items), local=False)


def attend_local(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, chosen_gr: Tensor
) -> None:
    """Combine the attention to the own chunk with `out` and `lse`; see `triton_forward.attend_local`.

    All chunks must be complete, because tiles are loaded without a mask.
    """
    tiles = problem.row_tiles(BLOCK_M.value)
    num_tiles = problem.slots * tiles * problem.num_groups
    _launch(problem, q, k, v, out, lse, chosen_gr, chosen_gr, problem.table, num_tiles, local=True)


def _launch(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, chosen: Tensor, order: Tensor,
    work: Tensor, num_tiles: int, *, local: bool,
) -> None:  # fmt: skip
    size, width = problem.layout.chunk_size, problem.head_dim
    # Layout of rows in registers: 16 bytes per thread, and whole rows in consecutive threads.
    rows_layout = gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])
    stages = SHARED_BYTES // ((BLOCK_M.value + 2 * size) * width * q.element_size())
    attend_hopper[(min(multiprocessors(q), num_tiles),)](
        tile_descriptor(k.flatten(1), size, width), tile_descriptor(v.flatten(1), size, width), q, out, lse, chosen,
        order, work, num_tiles, problem.rows, problem.scale / LN2,
        G=problem.num_groups, R=problem.heads_per_group, HEAD_DIM=width, STAGES=stages,
        TILES=problem.row_tiles(BLOCK_M.value), LOCAL=local, ROWS_LAYOUT=rows_layout,
        QUERIES_LAYOUT=shared_layout(BLOCK_M.value, width, q.dtype), num_warps=4,
    )  # fmt: skip
