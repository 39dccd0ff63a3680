"""Launches that select chunks for "exact" by screening in int8: bitwise the same result, in half the time."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.common.triton_math import multiprocessors, on_hopper
from kernels.top1_chunk import triton_recheck, triton_screen, triton_screen_hopper
from kernels.top1_chunk.triton_launch_order import Order, cut_into_segments
from kernels.top1_chunk.triton_problem import Problem

MIN_CHUNKS = 256
"""Minimum chunks of the longest document for screening to be faster; see docs/benchmarks/kernels.md."""

MIN_OPERATIONS = 2e12
"""Minimum `operations` in `screening_pays` for screening to be faster. Below it, launch overhead dominates."""

CANDIDATES = 64
"""Maximum number of stored candidates per row. A row with more is scored against all its earlier chunks."""

SURVIVORS = 16
"""Average number of candidates per row for which there is memory to rescore them. Rows whose candidates exceed this
memory are scored against all their earlier chunks.
"""

MAX_SCRATCH_SHARE = 0.12
"""Approximate limit of temporary memory, as a fraction of the bytes of q, k, v and o. A single key head may exceed the
limit.
"""

MIN_SCRATCH_BYTES = 2**28
"""Temporary memory in bytes that is allowed even if it exceeds `MAX_SCRATCH_SHARE`. With only one or two heads at a
time, launch overhead would be as large as the work (docs/benchmarks/kernels.md)."""

RECHECK_SEGMENT = 1024
"""Maximum number of rows that one program rescores against a chunk."""

SHARES = 64
"""Number of programs that share the chunks of a tile of rows with incomplete candidates."""

CENTRE_STRIDE = 16
"""Stride of the keys over which the centre is averaged, to reduce its cost."""


def screening_pays(problem: Problem, top_k: int) -> bool:
    """Return True if screening supports the problem and is faster for score "exact"."""
    chunks = problem.longest // problem.layout.chunk_size
    # Each query is scored against half of its document's keys, on average.
    operations = problem.num_groups * problem.rows * problem.longest * problem.head_dim
    return (
        top_k == 1
        and problem.dtype != torch.float32
        and MIN_CHUNKS <= chunks <= triton_screen.MAX_CHUNKS
        and operations >= MIN_OPERATIONS
        and problem.rows * CANDIDATES < 2**31
    )


def int8_width(problem: Problem) -> int:
    """Return the number of columns of int8 tiles, at least 32 because int8 products need 32."""
    return max(32, problem.shape["BLOCK_D"])


class Heads(NamedTuple):
    """Consecutive key heads of a problem that are screened together."""

    problem: Problem
    """The problem restricted to these heads."""
    num_groups: int
    """Total number of key heads of k, which determines the stride of its tokens."""
    q: Tensor
    """View [tokens, query heads, d] that starts at the first query head of these key heads."""
    k: Tensor
    """View [tokens, key heads, d] that starts at the first of these key heads."""
    centre_gd: Tensor
    """fp32 [these key heads, d], c of `triton_screen`. The mean of a head's keys gives the tightest bounds."""

    @property
    def shape(self) -> dict[str, int]:
        """Compile-time constants of kernels that read q or k."""
        return {"G": self.num_groups, "HEAD_DIM": self.problem.head_dim, "BLOCK_D": int8_width(self.problem)}

    def own_rows(self) -> tuple[tuple[int, int], dict[str, int]]:
        """Return the grid and constants of the kernels that process the candidates of the queries in each chunk."""
        block_m = self.problem.tiles("screen").block_m
        row_tiles = self.problem.row_tiles(block_m)
        constants = {"R": self.problem.heads_per_group, "BLOCK_M": block_m, "TILES": row_tiles, "CAPACITY": CANDIDATES}
        return (self.problem.slots * row_tiles, self.problem.num_groups), constants

    def empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Allocate an uninitialised tensor."""
        return torch.empty(shape, dtype=dtype, device=self.q.device)


class ScreenStatistics(NamedTuple):
    """Statistics of each row from screening, in addition to its candidates."""

    counts: Tensor
    """int32 [heads, rows], output of `triton_screen.screen`."""
    floors: Tensor
    """fp32 [heads, rows], output of `triton_screen.screen`."""
    query_scales: Tensor
    """fp32 [heads, 2, rows], output of `triton_screen.quantise_queries`."""


class MissedRows(NamedTuple):
    """Rows with incomplete candidates; see `triton_recheck.count_first`."""

    rows: Tensor
    """int32 [heads, rows], indices of these rows; only the first `counts` of each head are written."""
    slots: Tensor
    """int32 [heads, rows], slot of each of these rows."""
    counts: Tensor
    """int32 [heads], number of these rows."""


def select_screened(problem: Problem, q: Tensor, k: Tensor, chosen: Tensor, scratch: Tensor) -> None:
    """Write the slot of each row's best chunk to `chosen`, int32 [1, hkv, rows], as `select_by_keys` does.

    `scratch` as in `choose`.
    """
    # An approximate mean suffices, because the result is correct for any centre.
    centre_gd = k[::CENTRE_STRIDE].mean(0, dtype=torch.float32)
    ratio = problem.heads_per_group
    flat_scratch = scratch.view(-1)
    candidates = flat_scratch[: flat_scratch.numel() // 2 * 2].view(torch.int32)
    if len(candidates) < problem.rows * CANDIDATES:
        candidates = scratch.new_empty(problem.rows * CANDIDATES, dtype=torch.int32)
    count = num_heads_at_once(problem, len(candidates))
    for start in range(0, problem.num_groups, count):
        sub_problem = problem.with_heads(min(count, problem.num_groups - start))
        head_range = slice(start, start + sub_problem.num_groups)
        heads = Heads(sub_problem, problem.num_groups, q[:, start * ratio :], k[:, start:], centre_gd[head_range])
        score_candidates(heads, candidates, collect_candidates(heads, candidates), chosen[0, head_range])


def num_heads_at_once(problem: Problem, buffer_size: int) -> int:
    """Return the number of key heads to screen together, given the number of int32 elements for candidates."""
    width = int8_width(problem)
    input_bytes = (2 * problem.heads_per_group + 2) * problem.head_dim * problem.dtype.itemsize * problem.num_groups
    # Bytes per row: q8 or later the order, bounds, scales, counts and the best score. Bytes per key: k8.
    scratch_bytes = (max(width, 4 * SURVIVORS) + 40) * problem.heads_per_group + width
    most_heads = min(buffer_size, 2**31 - 1) // (problem.rows * CANDIDATES)
    least_heads = MIN_SCRATCH_BYTES * problem.heads_per_group // (scratch_bytes * problem.rows)
    num_fitting = max(1, min(max(int(MAX_SCRATCH_SHARE * input_bytes / scratch_bytes), least_heads), most_heads))
    return -(-problem.num_groups // -(-problem.num_groups // num_fitting))


def collect_candidates(heads: Heads, candidates: Tensor) -> ScreenStatistics:
    """Screen all chunks. Write `candidates`, int32 [at least heads * CANDIDATES * rows]; see `triton_screen.screen`."""
    problem, q, k, shape = heads.problem, heads.q, heads.k, heads.shape
    count, rows, slots, size = problem.num_groups, problem.rows, problem.slots, problem.layout.chunk_size
    width, tokens, block_m = shape["BLOCK_D"], len(k), 32
    q8 = heads.empty(count, rows, width, dtype=torch.int8)
    k8 = heads.empty(count, tokens, width, dtype=torch.int8)
    query_bounds, query_scales = (heads.empty(count, 2, rows, dtype=torch.float32) for _ in range(2))
    chunk_bounds = heads.empty(3, count, slots, dtype=torch.float32)
    triton_screen.quantise_queries[-(-rows // block_m), count](
        q, heads.centre_gd, q8, query_bounds, query_scales, rows, R=problem.heads_per_group, BLOCK_M=block_m, **shape
    )
    triton_screen.quantise_keys[slots, count](
        k, heads.centre_gd, k8, chunk_bounds, problem.table, tokens, slots, CHUNK=size, BLOCK_N=32, **shape
    )
    statistics = ScreenStatistics(heads.empty(count, rows), heads.empty(count, rows, dtype=torch.float32), query_scales)
    if on_hopper(q) and width >= triton_screen_hopper.MIN_WIDTH:
        triton_screen_hopper.launch(
            q8, query_bounds, k8, chunk_bounds, candidates, statistics.counts, statistics.floors, problem.table,
            heads_per_group=problem.heads_per_group, chunk_size=size, capacity=CANDIDATES,
        )  # fmt: skip
        return statistics
    tiles = problem.tiles("screen")
    grid, own_rows = heads.own_rows()
    triton_screen.screen[grid](
        q8, query_bounds, k8, chunk_bounds, candidates, statistics.counts, statistics.floors, problem.table, rows,
        slots, tokens, CHUNK=size, BLOCK_D=width, BLOCK_N=min(tiles.block_n, size), **own_rows, **tiles.launch(),
    )  # fmt: skip
    return statistics


def score_candidates(heads: Heads, candidates: Tensor, statistics: ScreenStatistics, chosen_gr: Tensor) -> None:
    """Rescore the candidates and write each row's best slot to `chosen_gr`, int32 [heads, rows].

    The outputs of `collect_candidates` are overwritten.
    """
    problem, q, k = heads.problem, heads.q, heads.k
    counts, num_groups, bins = statistics.counts, problem.num_groups, problem.num_groups * (problem.slots + 1)
    num_counters = bins * triton_recheck.COUNTERS.value
    counters, num_missed = counts.new_zeros(num_counters + num_groups).tensor_split([num_counters])
    missed_rows, missed_slots = heads.empty(2, *counts.shape)
    missed = MissedRows(missed_rows, missed_slots, num_missed)
    best = torch.full(counts.shape, triton_recheck.INITIAL_RANK.value, dtype=torch.int64, device=q.device)
    options: dict[str, Any] = {"R": problem.heads_per_group, "CHUNK": problem.layout.chunk_size}
    options |= problem.key_loop_options(problem.tiles("recheck")) | heads.shape
    for first in (True, False):
        order = _order_by_chunk(heads, candidates, statistics, best, chosen_gr, missed, counters.view(bins, -1), first)
        items = cut_into_segments(problem, order, RECHECK_SEGMENT, len(order.rows)).items
        triton_recheck.recheck[(len(items),)](q, k, best, order.rows, items, problem.rows, **options)
    # Missed rows are few, and a program without missed rows costs only its start.
    programs = -(-4 * multiprocessors(q) // problem.num_groups)
    triton_recheck.score_missed[programs, problem.num_groups](
        q, k, best, *missed, problem.table, problem.rows, SHARES=SHARES, **options
    )
    block = 1024
    triton_recheck.take_best[(-(-best.numel() // block),)](best, chosen_gr, best.numel(), BLOCK=block)


def _order_by_chunk(
    heads: Heads,
    candidates: Tensor,
    statistics: ScreenStatistics,
    best: Tensor,
    chosen_gr: Tensor,
    missed: MissedRows,
    chunk_counts: Tensor,
    first: bool,
) -> Order:
    """Order the rows to score by the chunk to score them against.

    If `first`, each row is listed for its first candidate. Otherwise each row is listed for its other candidates that
    may beat the first candidate's score in `best`.

    `chunk_counts`, int32 [heads * (slots + 1), COUNTERS], is zero before and after.
    """
    counts, floors, query_scales = statistics
    table, rows, slots = heads.problem.table, heads.problem.rows, heads.problem.slots
    grid, own_rows = heads.own_rows()
    if first:
        triton_recheck.count_first[grid](
            candidates, counts, floors, chosen_gr, chunk_counts, *missed, table, rows, slots, **own_rows
        )
    else:
        triton_recheck.count_others[grid](
            candidates, counts, floors, query_scales, best, chunk_counts, table, rows, slots, **own_rows
        )
    ends = chunk_counts.view(-1).cumsum(0, dtype=torch.int32).view_as(chunk_counts)
    order = Order(heads.empty((1 if first else SURVIVORS) * counts.numel()), ends)
    triton_recheck.place_counted[grid](
        candidates, counts, chunk_counts, ends, order.rows, len(order.rows), *missed, table, rows, slots,
        FIRST=first, **own_rows,
    )  # fmt: skip
    return order
