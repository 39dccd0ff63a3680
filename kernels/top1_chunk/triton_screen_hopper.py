"""Kernel `triton_screen.screen` for Hopper, in Gluon, Triton's language of explicit layouts and warps.

One warp loads tiles of keys into a ring buffer in shared memory by TMA. Four warp groups process 64 rows each with the
same tiles, so a tile is loaded once for 256 rows. While one group reduces its maxima, the products of another keep the
tensor cores busy. Values per row, such as bounds, stay in registers in the layout of the products.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.common.triton_hopper import GROUP_M, tile_descriptor
from kernels.top1_chunk import triton_screen
from kernels.top1_chunk.triton_attend import COLUMNS

GROUPS = gl.constexpr(4)
"""Number of warp groups that process rows."""

REGISTERS = gl.constexpr(112)
"""Registers per thread of the warp groups that process rows."""

MIN_WIDTH = 128
"""Minimum width of the int8 tiles. For narrower tiles, the maxima take most of the time, and `screen` has more warps
for them."""

RING_BYTES, MAX_STAGES, MAX_BLOCK_N = 96 * 1024, 6, 128

collect = gluon.jit(triton_screen.collect.fn)


@gluon.jit
def _tiles(table, slots, TILES: gl.constexpr):
    """Return a program's first and last tile of rows, and the first slot that these rows are scored against."""
    last = slots * TILES - 1 - gl.program_id(0) * GROUPS
    lowest = gl.maximum(last - GROUPS + 1, 0)
    return lowest, last, gl.load(table + lowest // TILES * COLUMNS + 5)


@gluon.jit
def _load(
    q_tiles, k_tiles, shared, table, rows, slots, tokens,
    R: gl.constexpr, CHUNK: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the tiles of queries, then the tiles of keys, each once all groups have released the tile's buffer."""
    queries, queries_ready, ring, ready, free = shared
    g = gl.program_id(1)
    lowest, last, first = _tiles(table, slots, TILES)
    BLOCK_N: gl.constexpr = k_tiles.block_type.shape[0]
    PER_CHUNK: gl.constexpr = CHUNK // BLOCK_N
    mbarrier.expect(queries_ready, GROUPS * q_tiles.block_type.nbytes)
    for group in gl.static_range(GROUPS):
        tile = gl.minimum(lowest + group, last)
        row = gl.load(table + tile // TILES * COLUMNS + 2) * R + tile % TILES * GROUP_M
        tma.async_copy_global_to_shared(q_tiles, [g * rows + row, 0], queries_ready, queries.index(group))
    for j in range((last // TILES - first) * PER_CHUNK):
        stage = j % STAGES
        key = gl.load(table + (first + j // PER_CHUNK) * COLUMNS) + j % PER_CHUNK * BLOCK_N
        mbarrier.wait(free.index(stage), (j // STAGES & 1) ^ 1)
        mbarrier.expect(ready.index(stage), k_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(k_tiles, [g * tokens + key, 0], ready.index(stage), ring.index(stage))


@gluon.jit
def _release_tiles(ready, free, begin, end, STAGES: gl.constexpr):
    """Release tiles of keys begin .. end - 1 unused, because only rows of other groups are scored against them."""
    for j in range(begin, end):
        mbarrier.wait(ready.index(j % STAGES), j // STAGES & 1)
        mbarrier.arrive(free.index(j % STAGES), count=1)


@gluon.jit
def _screen_rows(
    group: gl.constexpr, shared, bounds, outputs, table, rows, slots,
    R: gl.constexpr, CHUNK: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, CAPACITY: gl.constexpr,
):  # fmt: skip
    """Collect the candidates of one group's rows."""
    queries, queries_ready, ring, ready, free = shared
    query_bounds, chunk_bounds = bounds
    candidates, counts, floors = outputs
    BLOCK_N: gl.constexpr = ring.shape[1]
    PER_CHUNK: gl.constexpr = CHUNK // BLOCK_N
    products_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    rows_layout: gl.constexpr = gl.SliceLayout(1, products_layout)
    g, heads = gl.program_id(1), gl.num_programs(1)
    lowest, last, begin = _tiles(table, slots, TILES)
    tile = gl.minimum(lowest + group, last)
    slot = tile // TILES
    entry = table + slot * COLUMNS
    m = tile % TILES * GROUP_M + gl.arange(0, GROUP_M, layout=rows_layout)
    row = gl.load(entry + 2) * R + m
    valid = (m < gl.load(entry + 3) * R) & (lowest + group <= last)
    first = gl.load(entry + 5)
    index = g.to(gl.int64) * rows + row
    bound = query_bounds + g.to(gl.int64) * 2 * rows + row
    query_error = gl.load(bound, mask=valid, other=0.0)
    query_norm = gl.load(bound + rows, mask=valid, other=0.0)
    scales = chunk_bounds + g * slots
    key_norms, key_errors = scales + heads * slots, scales + 2 * heads * slots
    entries = candidates + g.to(gl.int64) * CAPACITY * rows + row
    floor = gl.full([GROUP_M], -float("inf"), gl.float32, layout=rows_layout)
    highest = gl.zeros([GROUP_M], gl.int32, layout=rows_layout)
    count = gl.zeros([GROUP_M], gl.int32, layout=rows_layout)
    zeros_mn = gl.zeros([GROUP_M, BLOCK_N], gl.int32, layout=products_layout)
    mbarrier.wait(queries_ready, 0)
    _release_tiles(ready, free, 0, (first - begin) * PER_CHUNK, STAGES)
    for j in range((first - begin) * PER_CHUNK, (slot - begin) * PER_CHUNK):
        stage = j % STAGES
        mbarrier.wait(ready.index(stage), j // STAGES & 1)
        keys = ring.index(stage).permute((1, 0))
        products = warpgroup_mma(queries.index(group), keys, zeros_mn, use_acc=False, is_async=True)
        # The following loads overlap with the product.
        chunk = begin + j // PER_CHUNK
        scale = gl.load(scales + chunk)
        error_bound = query_error * gl.load(key_norms + chunk) + query_norm * gl.load(key_errors + chunk)
        products = warpgroup_mma_wait(0, deps=[products])
        mbarrier.arrive(free.index(stage), count=1)
        is_last_tile = valid
        if PER_CHUNK == 1:
            highest = gl.max(products, 1)
        else:
            highest = gl.maximum(gl.where(j % PER_CHUNK == 0, -(2**31), highest), gl.max(products, 1))
            is_last_tile = valid & (j % PER_CHUNK == PER_CHUNK - 1)
        count, floor = collect(
            entries, rows, count, floor, highest, scale, error_bound, chunk - first, is_last_tile, CAPACITY
        )
    _release_tiles(ready, free, (slot - begin) * PER_CHUNK, (last // TILES - begin) * PER_CHUNK, STAGES)
    gl.store(counts + index, count, mask=valid)
    gl.store(floors + index, floor, mask=valid)


@gluon.jit
def screen_hopper(
    q_tiles, query_bounds, k_tiles, chunk_bounds, candidates, counts, floors, table, rows, slots, tokens,
    R: gl.constexpr, CHUNK: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, CAPACITY: gl.constexpr,
):  # fmt: skip
    """Implement `screen`. Grid (slots * TILES / GROUPS, heads), the last slots first.

    Args:
        q_tiles, k_tiles: descriptors of q8 [heads * rows, BLOCK_D] and k8 [heads * tokens, BLOCK_D] in tiles of
            GROUP_M and of at most CHUNK rows.
    """
    BLOCK_N: gl.constexpr = k_tiles.block_type.shape[0]
    queries = gl.allocate_shared_memory(gl.int8, [GROUPS, GROUP_M, q_tiles.block_type.shape[1]], q_tiles.layout)
    ring = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, k_tiles.block_type.shape[1]], k_tiles.layout)
    queries_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(queries_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    fence_async_shared()
    shared = (queries, queries_ready, ring, ready, free)
    bounds = (query_bounds, chunk_bounds)
    outputs = (candidates, counts, floors)
    gl.warp_specialize(
        [
            (_screen_rows, (0, shared, bounds, outputs, table, rows, slots, R, CHUNK, TILES, STAGES, CAPACITY)),
            (_screen_rows, (1, shared, bounds, outputs, table, rows, slots, R, CHUNK, TILES, STAGES, CAPACITY)),
            (_screen_rows, (2, shared, bounds, outputs, table, rows, slots, R, CHUNK, TILES, STAGES, CAPACITY)),
            (_screen_rows, (3, shared, bounds, outputs, table, rows, slots, R, CHUNK, TILES, STAGES, CAPACITY)),
            (_load, (q_tiles, k_tiles, shared, table, rows, slots, tokens, R, CHUNK, TILES, STAGES)),
        ],
        [4, 4, 4, 1],
        [REGISTERS, REGISTERS, REGISTERS, 24],
    )


def launch(
    q8: Tensor, query_bounds: Tensor, k8: Tensor, chunk_bounds: Tensor, candidates: Tensor, counts: Tensor,
    floors: Tensor, table: Tensor, *, heads_per_group: int, chunk_size: int, capacity: int,
) -> None:  # fmt: skip
    """Launch `screen_hopper`: q8 [heads, rows, BLOCK_D], k8 [heads, tokens, BLOCK_D], the rest as in `screen`."""
    (heads, rows, width), tokens, slots = q8.shape, k8.shape[1], len(table)
    block_n = min(MAX_BLOCK_N, chunk_size)
    q_tiles = tile_descriptor(q8.view(-1, width), GROUP_M.value, width)
    k_tiles = tile_descriptor(k8.view(-1, width), block_n, width)
    tiles = -(-chunk_size * heads_per_group // GROUP_M.value)
    stages = min(MAX_STAGES, RING_BYTES // (block_n * width))
    screen_hopper[-(-slots * tiles // GROUPS.value), heads](
        q_tiles, query_bounds, k_tiles, chunk_bounds, candidates, counts, floors, table, rows, slots, tokens,
        R=heads_per_group, CHUNK=chunk_size, TILES=tiles, STAGES=stages, CAPACITY=capacity, num_warps=4,
    )  # fmt: skip
