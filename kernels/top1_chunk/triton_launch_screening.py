"""Launches that choose chunks for "exact" by way of int8: the same bits as from all keys, in half the time."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.top1_chunk import triton_recheck, triton_screen, triton_screen_hopper
from kernels.top1_chunk.triton_launch_order import Order, cut
from kernels.top1_chunk.triton_problem import Problem
from kernels.triton_math import multiprocessors, on_hopper

LEAST_CHUNKS = 256
"""Complete chunks of the longest document from which on this pays; docs/benchmarks/kernels.md."""

LEAST_OPERATIONS = 2e12
"""Of scoring all keys, likewise: with less work the launches on the way take longer than it."""

CANDIDATES = 64
"""Places for a row's candidates; a row that needs more is scored against all its chunks."""

SURVIVORS = 16
"""Candidates a row, on average, that can be scored again; the rows beyond, likewise."""

HELD_SHARE = 0.12
"""Of the bytes of q, k, v and o: about what may be held at a time, one key head's worth at least."""

LEAST_HELD = 2**28
"""Bytes that may be held, too, however few heads there are: for a head or two at a time the launches take as long as
what they launch (docs/benchmarks/kernels.md)."""

RECHECK_SEGMENT = 1024
"""Rows that one program scores against a chunk."""

SHARES = 64
"""Programs that share the chunks of a tile of missed rows."""

CENTRE_STRIDE = 16
"""Of the keys whose mean is taken: fewer cost less."""


def screening_pays(problem: Problem, top_k: int) -> bool:
    """Whether "exact" is worth the way through candidates, and can go it."""
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
    """Columns of the int8 tiles: int8 products want 32 at least."""
    return max(32, problem.shape["BLOCK_D"])


class Heads(NamedTuple):
    """Some neighbouring key heads of a problem."""

    problem: Problem
    """With these heads only."""
    num_groups: int
    """Key heads that k has in memory."""
    q: Tensor
    """[tokens, hq, d], from the first of the heads on; so is k."""
    k: Tensor
    centre_gd: Tensor
    """fp32, any vector of each head; near the mean of its keys is best."""

    @property
    def shape(self) -> dict[str, int]:
        """Constants of kernels that read q or k."""
        return {"G": self.num_groups, "HEAD_DIM": self.problem.head_dim, "BLOCK_D": int8_width(self.problem)}

    def own_rows(self) -> tuple[tuple[int, int], dict[str, int]]:
        """Grid and constants of the kernels that take the candidates of each slot's own rows."""
        block_m = self.problem.tiles("screen").block_m
        row_tiles = self.problem.row_tiles(block_m)
        constants = {"R": self.problem.heads_per_group, "BLOCK_M": block_m, "TILES": row_tiles, "CAPACITY": CANDIDATES}
        return (self.problem.slots * row_tiles, self.problem.num_groups), constants

    def new(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """A tensor with anything in it."""
        return torch.empty(shape, dtype=dtype, device=self.q.device)


class Found(NamedTuple):
    """What screening tells of each row, beside its candidates; see `triton_screen`."""

    counts: Tensor
    floors: Tensor
    query_scales: Tensor


class Missed(NamedTuple):
    """Rows whose candidates are not complete; see `triton_recheck.count_first`."""

    rows: Tensor
    slots: Tensor
    number: Tensor


def select_screened(problem: Problem, q: Tensor, k: Tensor, chosen: Tensor, scratch: Tensor) -> None:
    """Write `chosen`, int32 [1, hkv, rows], as `select_by_keys` does. `scratch` as in `choose`."""
    # Near the mean of all, and any will do.
    centre_gd = k[::CENTRE_STRIDE].mean(0, dtype=torch.float32)
    ratio = problem.heads_per_group
    flat = scratch.view(-1)
    places = flat[: flat.numel() // 2 * 2].view(torch.int32)
    if len(places) < problem.rows * CANDIDATES:
        places = scratch.new_empty(problem.rows * CANDIDATES, dtype=torch.int32)
    count = heads_at_once(problem, len(places))
    for start in range(0, problem.num_groups, count):
        part = problem.of_heads(min(count, problem.num_groups - start))
        own = slice(start, start + part.num_groups)
        heads = Heads(part, problem.num_groups, q[:, start * ratio :], k[:, start:], centre_gd[own])
        score_candidates(heads, places, collect_candidates(heads, places), chosen[0, own])


def heads_at_once(problem: Problem, places: int) -> int:
    """Key heads that are screened together; `places` is what there is for candidates."""
    width = int8_width(problem)
    held = (2 * problem.heads_per_group + 2) * problem.head_dim * problem.dtype.itemsize * problem.num_groups
    # q8 or the order, and bounds, scales, counts and the best of each row; k8.
    new = (max(width, 4 * SURVIVORS) + 40) * problem.heads_per_group + width
    most = min(places, 2**31 - 1) // (problem.rows * CANDIDATES)
    least = LEAST_HELD * problem.heads_per_group // (new * problem.rows)
    fits = max(1, min(max(int(HELD_SHARE * held / new), least), most))
    return -(-problem.num_groups // -(-problem.num_groups // fits))


def collect_candidates(heads: Heads, candidates: Tensor) -> Found:
    """Write `candidates`, int32 [at least heads * CANDIDATES * rows], as `screen` does."""
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
    """Write `chosen_gr`, int32 [heads, rows]. What `collect_candidates` gave is overwritten."""
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
    # There are few, and what a program without any costs is its start.
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
    """Give the rows to score: those of each row's first candidate, and then, with its score in `best`, of the others.

    `chunk_counts`, int32 [heads * (slots + 1), COUNTERS], is zero before and afterwards.
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
