"""The order of the Triton kernels, their tile sizes and their buffers."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.top1_chunk import triton_backward, triton_forward, triton_group, triton_select
from kernels.top1_chunk.chunks import Layout
from kernels.triton_math import next_power_of_two, on_device

LN2 = 0.6931471805599453


class Tiles(NamedTuple):
    """Sizes of one kernel's tiles and its launch."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def launch(self) -> dict[str, int | None]:
        """Triton's options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_registers}


class Problem(NamedTuple):
    """What all kernels of one call share. Tensors are flat: q [tokens, hq, d], k and v [tokens, hkv, d]."""

    table: Tensor
    layout: Layout
    num_heads: int
    num_groups: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    local: bool

    @property
    def heads_per_group(self) -> int:
        """Query heads of one key head."""
        return self.num_heads // self.num_groups

    @property
    def rows(self) -> int:
        """Query rows of one key head."""
        return self.layout.batch * self.layout.num_queries * self.heads_per_group

    @property
    def rows_per_chunk(self) -> int:
        """Rows of one key head that a whole chunk has."""
        return self.layout.chunk_size * self.heads_per_group

    @property
    def slots(self) -> int:
        """Chunks of all rows or documents."""
        return len(self.table)

    @property
    def shape(self) -> dict[str, int]:
        """Constants of every kernel."""
        return {"G": self.num_groups, "HEAD_DIM": self.head_dim, "BLOCK_D": max(16, next_power_of_two(self.head_dim))}

    def tiles(self, kernel: str) -> Tiles:
        """Tile sizes of a kernel for this dtype and head dim; keys within a chunk, rows within its rows."""
        width = "small" if self.head_dim <= 64 else "narrow" if self.head_dim <= 128 else "wide"
        chosen = TILES[kernel, "fp32" if self.dtype == torch.float32 else width]
        block_m = min(chosen.block_m, max(16, next_power_of_two(self.rows_per_chunk)))
        return chosen._replace(block_m=block_m)

    def row_tiles(self, block_m: int) -> int:
        """Tiles of a slot's own rows."""
        return -(-self.rows_per_chunk // block_m)


TILES = {
    ("mean", "small"): Tiles(16, 128, 4, 1),
    ("mean", "narrow"): Tiles(16, 128, 4, 1),
    ("mean", "wide"): Tiles(16, 128, 4, 1),
    ("mean", "fp32"): Tiles(16, 64, 4, 1),
    ("select_mean", "small"): Tiles(128, 32, 4, 3),
    ("select_mean", "narrow"): Tiles(128, 32, 8, 3),
    ("select_mean", "wide"): Tiles(128, 32, 8, 2),
    ("select_mean", "fp32"): Tiles(32, 32, 4, 1),
    ("select_keys", "small"): Tiles(128, 128, 8, 3),
    ("select_keys", "narrow"): Tiles(128, 128, 8, 2),
    ("select_keys", "wide"): Tiles(128, 64, 8, 2),
    ("select_keys", "fp32"): Tiles(32, 32, 4, 1),
    ("local", "small"): Tiles(64, 32, 4, 4),
    ("local", "narrow"): Tiles(64, 32, 4, 3),
    ("local", "wide"): Tiles(64, 32, 4, 2),
    ("local", "fp32"): Tiles(32, 32, 4, 1),
    ("chosen", "small"): Tiles(64, 128, 4, 1, 128),
    ("chosen", "narrow"): Tiles(64, 32, 4, 2),
    ("chosen", "wide"): Tiles(64, 32, 4, 2),
    ("chosen", "fp32"): Tiles(32, 32, 4, 1),
    ("local_backward", "small"): Tiles(64, 128, 8, 2),
    ("local_backward", "narrow"): Tiles(64, 128, 8, 2),
    ("local_backward", "wide"): Tiles(32, 64, 8, 1),
    ("local_backward", "fp32"): Tiles(16, 32, 4, 1),
    ("chosen_backward", "small"): Tiles(32, 128, 4, 2),
    ("chosen_backward", "narrow"): Tiles(32, 128, 8, 3),
    ("chosen_backward", "wide"): Tiles(32, 64, 8, 1),
    ("chosen_backward", "fp32"): Tiles(16, 32, 4, 1),
}
"""Measured on an H200; docs/benchmarks/kernels.md tells what else was tried."""


class Segments(NamedTuple):
    """Rows that chose one chunk, cut into work items; see `triton_group.cut_segments`."""

    items: Tensor
    part_ends: Tensor
    part_counts: Tensor
    num_parts: int
    """Upper bound of the segments of chunks that have several."""


def backward_segment(problem: Problem) -> int:
    """Rows that one program of the backward takes of those that chose one chunk.

    16 chunks' worth: then the parts of dk and dv that chunks with several segments leave, at most two for each full
    segment, are at most a sixteenth of all inputs, outputs and gradients.
    """
    return max(1024, 16 * problem.layout.chunk_size)


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, top_k: int, score: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The whole forward.

    Returns:
        out: [tokens, hq, d] in v's dtype.
        lse: fp32 [hkv, rows], logsumexp in units of log2.
        chosen: int32 [top_k, hkv, rows], slots, best first; -1 where there is none.
    """
    # One join rounds the first part once more; several would add up.
    out = torch.empty(q.shape, dtype=v.dtype if top_k == 1 else torch.float32, device=q.device)
    lse = torch.empty(problem.num_groups, problem.rows, dtype=torch.float32, device=q.device)
    chosen = torch.empty(top_k, problem.num_groups, problem.rows, dtype=torch.int32, device=q.device)
    with on_device(q):
        if score == "approx":
            select_by_mean(problem, q, k, chosen)
        else:
            select_by_keys(problem, q, k, chosen, lse=score == "exact_lse")
        attend_local(problem, q, k, v, out, lse)
        for chosen_gr in chosen:
            attend_chosen(problem, q, k, v, chosen_gr, out, lse)
    return out.to(v.dtype), lse, chosen


def select_by_mean(problem: Problem, q: Tensor, k: Tensor, chosen: Tensor) -> None:
    """Write `chosen`."""
    means = mean_keys(problem, k)
    tiles = problem.tiles("select_mean")
    row_tiles = problem.row_tiles(tiles.block_m)
    triton_select.select_by_mean[problem.slots * row_tiles, problem.num_groups](
        q, means, chosen, problem.table, problem.rows, problem.slots,
        R=problem.heads_per_group, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, TILES=row_tiles, TOP_K=len(chosen),
        LIST=next_power_of_two(len(chosen)), **tiles.launch(), **problem.shape,
    )  # fmt: skip


def select_by_keys(problem: Problem, q: Tensor, k: Tensor, chosen: Tensor, *, lse: bool) -> None:
    """Write `chosen`."""
    tiles = problem.tiles("select_keys")
    row_tiles = problem.row_tiles(tiles.block_m)
    triton_select.select_by_keys[problem.slots * row_tiles, problem.num_groups](
        q, k, chosen, problem.table, problem.rows, problem.slots, problem.scale / LN2,
        R=problem.heads_per_group, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, CHUNK=problem.layout.chunk_size,
        TILES=row_tiles, TOP_K=len(chosen), LIST=next_power_of_two(len(chosen)), LSE=lse,
        **tiles.launch(), **problem.shape,
    )  # fmt: skip


def mean_keys(problem: Problem, k: Tensor) -> Tensor:
    """Mean key of every slot: [slots, hkv, d] in k's dtype."""
    means = torch.empty(problem.slots, problem.num_groups, problem.head_dim, dtype=k.dtype, device=k.device)
    tiles, size = problem.tiles("mean"), problem.layout.chunk_size
    triton_select.mean_keys[problem.slots, problem.num_groups](
        k, means, problem.table, CHUNK=size, BLOCK_N=min(size, tiles.block_n),
        num_warps=tiles.num_warps, **problem.shape,
    )  # fmt: skip
    return means


def attend_local(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """Write the own chunk's part of `out` and `lse`."""
    tiles = problem.tiles("local")
    row_tiles = problem.row_tiles(tiles.block_m)
    triton_forward.attend_local[problem.slots * row_tiles, problem.num_groups](
        q, k, v, out, lse, problem.table, problem.rows, problem.slots, problem.scale / LN2,
        R=problem.heads_per_group, TILES=row_tiles, LOCAL=problem.local,
        **_keys_and_launch(problem, tiles), **problem.shape,
    )  # fmt: skip


def attend_chosen(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, chosen_gr: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Join the part of one choice, int32 [hkv, rows], to `out` and `lse`."""
    tiles = problem.tiles("chosen")
    order, ends = group(problem, chosen_gr)
    items = cut(problem, ends, tiles.block_m).items
    triton_forward.attend_chosen[(len(items),)](
        q, k, v, out, lse, order, items, problem.rows, problem.scale / LN2,
        R=problem.heads_per_group, CHUNK=problem.layout.chunk_size,
        **_keys_and_launch(problem, tiles), **problem.shape,
    )  # fmt: skip


def group(problem: Problem, chosen_gr: Tensor) -> tuple[Tensor, Tensor]:
    """Order the rows by one choice, int32 [hkv, rows].

    Returns:
        order: int32, rows by key head, then slot, then row.
        ends: int32 [hkv * (slots + 1)], where each bin ends in it; the last bin of a head holds those that chose none.
    """
    num_groups, rows, slots, device = problem.num_groups, problem.rows, problem.slots, chosen_gr.device
    size = triton_group.ORDER_BLOCK
    blocks = -(-rows // size)
    grid, bins = (blocks, num_groups), num_groups * (slots + 1)
    keys = torch.empty(num_groups, blocks, size, dtype=torch.int32, device=device)
    counts = torch.zeros(bins, blocks, dtype=torch.int32, device=device)
    order = torch.empty(keys.numel(), dtype=torch.int32, device=device)
    triton_group.sort_blocks[grid](chosen_gr, keys, rows, slots, blocks, BLOCK=size)
    triton_group.count_runs[grid](keys, counts, slots, blocks, BLOCK=size)
    ends = counts.view(-1).cumsum(0, dtype=torch.int32).view(bins, blocks)
    triton_group.place_rows[grid](keys, ends, counts, order, slots, blocks, BLOCK=size)
    return order, ends[:, -1].contiguous()


def cut(problem: Problem, ends: Tensor, size: int) -> Segments:
    """Cut each bin's rows into segments of `size`."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    counts.view(problem.num_groups, -1)[:, -1] = 0
    segments = (counts + (size - 1)) // size
    parts = segments * (segments > 1)
    item_ends = segments.cumsum(0, dtype=torch.int32)
    part_ends = parts.cumsum(0, dtype=torch.int32)
    full = problem.num_groups * problem.rows // size
    num_items = problem.num_groups * problem.slots + full
    items = torch.empty(num_items, 6, dtype=torch.int32, device=ends.device)
    block = 128
    triton_group.cut_segments[(-(-num_items // block),)](
        item_ends, segments, ends, counts, part_ends, parts, problem.table, items, num_items, len(ends),
        problem.slots,
        SEGMENT=size, STEPS=len(ends).bit_length(), BLOCK=block,
    )  # fmt: skip
    return Segments(items, part_ends, parts, 2 * full)


def backward(
    problem: Problem, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, chosen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) in the inputs' dtype."""
    num_groups, rows, slots = problem.num_groups, problem.rows, problem.slots
    local, remote = problem.tiles("local_backward"), problem.tiles("chosen_backward")
    block_n = min(local.block_n, problem.layout.chunk_size)
    launches = problem.layout.chunk_size // block_n
    # Each further launch adds to what is there: in the inputs' dtype that would round again and again.
    once = len(chosen) == 1 and launches == 1
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype if once else torch.float32, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    shape = {"R": problem.heads_per_group, **problem.shape}
    with on_device(q):
        for first_key in range(0, launches * block_n, block_n):
            triton_backward.differentiate_local[slots, num_groups](
                q, k, v, out, grad, lse, delta, dq, dk, dv, problem.table, rows, slots, problem.scale,
                FIRST_KEY=first_key, LOCAL=problem.local, **_keys_and_launch(problem, local), **shape,
            )  # fmt: skip
        for chosen_gr in chosen:
            order, ends = group(problem, chosen_gr)
            segments = cut(problem, ends, backward_segment(problem))
            parts = torch.empty(
                max(segments.num_parts, 1), 2, block_n, problem.head_dim, dtype=torch.float32, device=q.device
            )
            for first_key in range(0, launches * block_n, block_n):
                triton_backward.differentiate_chosen[(len(segments.items),)](
                    q, k, v, grad, lse, delta, dq, dk, dv, parts, order, segments.items,
                    rows, problem.scale,
                    FIRST_KEY=first_key, **_keys_and_launch(problem, remote), **shape,
                )  # fmt: skip
                if segments.num_parts:
                    part_rows = min(32, block_n)
                    triton_backward.add_parts[len(segments.part_ends), block_n // part_rows](
                        parts, segments.part_ends, segments.part_counts, dk, dv, problem.table, slots,
                        BLOCK_N=block_n, BLOCK_ROWS=part_rows, FIRST_KEY=first_key, **problem.shape,
                    )  # fmt: skip
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _keys_and_launch(problem: Problem, tiles: Tiles) -> dict[str, Any]:
    return {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": min(tiles.block_n, problem.layout.chunk_size),
        **tiles.launch(),
    }
