"""Launches that select chunks for "exact" by screening in int8: bitwise the same result, in half the time."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.common.triton_math import multiprocessors, on_hopper
from kernels.top1_chunk import triton_recheck, triton_screen, triton_screen_hopper
from kernels.top1_chunk.triton_launch_order import Order, cut
from kernels.top1_chunk.triton_problem import Problem

LEAST_CHUNKS = 256
"""Minimum chunks of the longest document for screening to be faster; see docs/benchmarks/kernels.md."""

LEAST_OPERATIONS = 2e12
"""Minimum `operations` in `screening_pays` for screening to be faster. Below it, launch overhead dominates."""

CANDIDATES = 64
"""Maximum number of stored candidates per row. A row with more is scored against all its earlier chunks."""

SURVIVORS = 16
"""Average number of candidates per row for which there is memory to rescore them. Rows whose candidates exceed this
memory are scored against all their earlier chunks.
"""

HELD_SHARE = 0.12
"""Approximate limit of temporary memory, as a fraction of the bytes of q, k, v and o. A single key head may exceed the
limit.
"""

LEAST_HELD = 2**28
"""Temporary memory in bytes that is allowed even if it exceeds `HELD_SHARE`. With only one or two heads at a time,
launch overhead would be as large as the work (docs/benchmarks/kernels.md)."""

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
        and LEAST_CHUNKS <= chunks <= triton_screen.MAX_CHUNKS
        and operations >= LEAST_OPERATIONS
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

    def new(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Allocate an uninitialised tensor."""
        return torch.empty(shape, dtype=dtype, device=self.q.device)


class Found(NamedTuple):
    """Statistics of each row from screening, in addition to its candidates."""

    counts: Tensor
    """int32 [heads, rows], output of `triton_screen.screen`."""
    floors: Tensor
    """fp32 [heads, rows], output of `triton_screen.screen`."""
    query_scales: Tensor
    """fp32 [heads, 2, rows], output of `triton_screen.quantise_queries`."""


class Missed(NamedTuple):
    """Rows with incomplete candidates; see `triton_recheck.count_first`."""

    rows: Tensor
    """int32 [heads, rows], indices of these rows; only the first `number` of each head are written."""
    slots: Tensor
    """int32 [heads, rows], slot of each of these rows."""
    number: Tensor
    """int32 [heads], number of these rows."""


def select_screened(problem: Problem, q: Tensor, k: Tensor, chosen: Tensor, scratch: Tensor) -> None:
    """Write the slot of each row's best chunk to `chosen`, int32 [1, hkv, rows], as `select_by_keys` does.

    `scratch` as in `choose`.
    """
    # An approximate mean suffices, because the result is correct for any centre.
    centre_gd = k[::CENTRE_STRIDE].mean(0, dtype=torch.float32)
    ratio = problem.heads_per_group
    flat = scratch.view(-1)
    candidates = flat[: flat.numel() // 2 * 2].view(torch.int32)
    if len(candidates) < problem.rows * CANDIDATES:
        candidates = scratch.new_empty(problem.rows * CANDIDATES, dtype=torch.int32)
    count = heads_at_once(problem, len(candidates))
    for start in range(0, problem.num_groups, count):
        part = problem.with_heads(min(count, problem.num_groups - start))
        own = slice(start, start + part.num_groups)
        heads = Heads(part, problem.num_groups, q[:, start * ratio :], k[:, start:], centre_gd[own])
        score_candidates(heads, candidates, collect_candidates(heads, candidates), chosen[0, own])


def heads_at_once(problem: Problem, buffer_size: int) -> int:
    """Return the number of key heads to screen together, given the number of int32 elements for candidates."""
    width = int8_width(problem)
    held = (2 * problem.heads_per_group + 2) * problem.head_dim * problem.dtype.itemsize * problem.num_groups
    # Bytes per row: q8 or later the order, bounds, scales, counts and the best score. Bytes per key: k8.
    new = (max(width, 4 * SURVIVORS) + 40) * problem.heads_per_group + width
    most = min(buffer_size, 2**31 - 1) // (problem.rows * CANDIDATES)
    least = LEAST_HELD * problem.heads_per_group // (new * problem.rows)
    fits = max(1, min(max(int(HELD_SHARE * held / new), least), most))
    return -(-problem.num_groups // -(-problem.num_groups // fits))


def collect_candidates(heads: Heads, candidates: Tensor) -> Found:
    """Screen all chunks. Write `candidates`, int32 [at least heads * CANDIDATES * rows]; see `triton_screen.screen`."""
    problem, q, k, shape = heads.problem, heads.q, heads.k, heads.shape
    count, rows, slots, size = problem.num_groups, problem.rows, problem.slots, problem.layout.chunk_size
    width, tokens, block_m = shape["BLOCK_D"], len(k), 32
    q8 = heads.new(count, rows, width, dtype=torch.int8)
    k8 = heads.new(count, tokens, width, dtype=torch.int8)
    query_bounds, query_scales = (heads.new(count, 2, rows, dtype=torch.float32) for _ in range(2))
    chunk_bounds = heads.new(3, count, slots, dtype=torch.float32)
    triton_screen.quantise_queries[-(-rows // block_m), count](
        q, heads.centre_gd, q8, query_bounds, query_scales, rows, R=problem.heads_per_group, BLOCK_M=block_m, **shape
    )
    triton_screen.quantise_keys[slots, count](
        k, heads.centre_gd, k8, chunk_bounds, problem.table, tokens, slots, CHUNK=size, BLOCK_N=32, **shape
    )
    found = Found(heads.new(count, rows), heads.new(count, rows, dtype=torch.float32), query_scales)
    if on_hopper(q) and width >= triton_screen_hopper.LEAST_WIDTH:
        triton_screen_hopper.launch(
            q8, query_bounds, k8, chunk_bounds, candidates, found.counts, found.floors, problem.table,
            heads_per_group=problem.heads_per_group, chunk_size=size, capacity=CANDIDATES,
        )  # fmt: skip
        return found
    tiles = problem.tiles("screen")
    grid, own_rows = heads.own_rows()
    triton_screen.screen[grid](
        q8, query_bounds, k8, chunk_bounds, candidates, found.counts, found.floors, problem.table, rows, slots, tokens,
        CHUNK=size, BLOCK_D=width, BLOCK_N=min(tiles.block_n, size), **own_rows, **tiles.launch(),
    )  # fmt: skip
    return found


def score_candidates(heads: Heads, candidates: Tensor, found: Found, chosen_gr: Tensor) -> None:
    """Rescore the candidates and write each row's best slot to `chosen_gr`, int32 [heads, rows].

    The outputs of `collect_candidates` are overwritten.
    """
    problem, q, k = heads.problem, heads.q, heads.k
    counts, num_groups, bins = found.counts, problem.num_groups, problem.num_groups * (problem.slots + 1)
    num_counters = bins * triton_recheck.COUNTERS.value
    counters, num_missed = counts.new_zeros(num_counters + num_groups).tensor_split([num_counters])
    missed_rows, missed_slots = heads.new(2, *counts.shape)
    missed = Missed(missed_rows, missed_slots, num_missed)
    best = torch.full(counts.shape, triton_recheck.NONE_YET.value, dtype=torch.int64, device=q.device)
    options: dict[str, Any] = {"R": problem.heads_per_group, "CHUNK": problem.layout.chunk_size}
    options |= problem.keys_and_launch(problem.tiles("recheck")) | heads.shape
    for first in (True, False):
        order = _order_by_chunk(heads, candidates, found, best, chosen_gr, missed, counters.view(bins, -1), first)
        items = cut(problem, order, RECHECK_SEGMENT, len(order.rows)).items
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
    found: Found,
    best: Tensor,
    chosen_gr: Tensor,
    missed: Missed,
    chunk_counts: Tensor,
    first: bool,
) -> Order:
    """Order the rows to score by the chunk to score them against.

    If `first`, each row is listed for its first candidate. Otherwise each row is listed for its other candidates that
    may beat the first candidate's score in `best`.

    `chunk_counts`, int32 [heads * (slots + 1), COUNTERS], is zero before and after.
    """
    counts, floors, query_scales = found
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
    order = Order(heads.new((1 if first else SURVIVORS) * counts.numel()), ends)
    triton_recheck.place_counted[grid](
        candidates, counts, chunk_counts, ends, order.rows, len(order.rows), *missed, table, rows, slots,
        FIRST=first, **own_rows,
    )  # fmt: skip
    return order
