"""Launch sequence and buffers of the complete forward and backward pass."""

import torch
from torch import Tensor

from kernels.common.triton_math import on_device, on_hopper
from kernels.top1_chunk import triton_attend_hopper, triton_backward, triton_forward
from kernels.top1_chunk.triton_launch_choice import choose
from kernels.top1_chunk.triton_launch_order import cut_into_segments, order_by_chunk
from kernels.top1_chunk.triton_problem import LN2, Problem


def backward_segment(problem: Problem) -> int:
    """Return the size of a segment: the rows that chose the same chunk are divided among programs in segments.

    A full segment has at least 16 rows per key of the chunk. Each segment of a chunk with several segments needs a
    partial dk and dv. There are at most two such partial results per full segment, so they take at most a sixteenth of
    the memory of all inputs, outputs and gradients.
    """
    return max(1024, 16 * problem.layout.chunk_size)


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, top_k: int, score: str, selected_slots: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward pass. If `selected_slots` is given, it is returned as `chosen`, and no chunks are selected.

    Returns:
        out: [tokens, hq, d] in v's dtype.
        lse: fp32 [hkv, rows], log-sum-exp in units of log2.
        chosen: int32 [top_k, hkv, rows], slots, best first; -1 for a missing chunk.
    """
    # With top_k = 1, `out` is rounded only once between the chosen and the own chunk. With more chunks, the rounding
    # errors would accumulate, so the sum is in fp32.
    out = torch.empty(q.shape, dtype=v.dtype if top_k == 1 else torch.float32, device=q.device)
    lse = torch.empty(problem.num_groups, problem.rows, dtype=torch.float32, device=q.device)
    with on_device(q):
        if selected_slots is None:
            chosen = torch.empty(top_k, problem.num_groups, problem.rows, dtype=torch.int32, device=q.device)
            choose(problem, q, k, chosen, score, scratch=out)
        else:
            chosen = selected_slots
        for rank, chosen_gr in enumerate(chosen):
            attend_chosen(problem, q, k, v, chosen_gr, out, lse, joins=rank > 0)
        attend_local(problem, q, k, v, chosen[0], out, lse)
    return out.to(v.dtype), lse, chosen


def _hopper_kernels_fit(problem: Problem, q: Tensor, out: Tensor) -> bool:
    # The Hopper kernels would round fp32 outputs, which are used for top_k > 1, in shared memory.
    return on_hopper(q) and triton_attend_hopper.fits(problem) and out.dtype == q.dtype


def attend_chosen(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, chosen_gr: Tensor, out: Tensor, lse: Tensor, *, joins: bool
) -> None:
    """Compute the attention of each row to its chunk in `chosen_gr`, int32 [hkv, rows].

    The result is written to `out` and `lse`, or combined with their contents if `joins`.
    """
    order = order_by_chunk(problem, chosen_gr)
    if _hopper_kernels_fit(problem, q, out) and not joins:
        items = cut_into_segments(problem, order, triton_attend_hopper.BLOCK_M.value, chosen_gr.numel()).items
        triton_attend_hopper.attend_chosen(problem, q, k, v, out, lse, order.rows, items)
        return
    tiles = problem.tiles("chosen")
    items = cut_into_segments(problem, order, tiles.block_m, chosen_gr.numel()).items
    triton_forward.attend_chosen[(len(items),)](
        q, k, v, out, lse, order.rows, items, problem.rows, problem.scale / LN2,
        R=problem.heads_per_group, CHUNK=problem.layout.chunk_size, JOINS=joins,
        **problem.key_loop_options(tiles), **problem.shape,
    )  # fmt: skip


def attend_local(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, chosen_gr: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Combine the attention of each row to its own chunk with `out` and `lse`.

    For rows without a chosen chunk, `out` and `lse` are uninitialised and are overwritten.
    """
    if _hopper_kernels_fit(problem, q, out) and problem.local and problem.whole_chunks:
        triton_attend_hopper.attend_local(problem, q, k, v, out, lse, chosen_gr)
        return
    tiles = problem.tiles("local")
    row_tiles = problem.row_tiles(tiles.block_m)
    triton_forward.attend_local[(problem.num_groups * problem.slots * row_tiles,)](
        q, k, v, out, lse, chosen_gr, problem.table, problem.rows, problem.scale / LN2,
        R=problem.heads_per_group, TILES=row_tiles, LOCAL=problem.local,
        **problem.key_loop_options(tiles), **problem.shape,
    )  # fmt: skip


def backward(
    problem: Problem, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, chosen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv) in the inputs' dtype."""
    num_groups, rows, slots = problem.num_groups, problem.rows, problem.slots
    local_tiles, chosen_tiles = problem.tiles("local_backward"), problem.tiles("chosen_backward")
    block_n = min(local_tiles.block_n, problem.layout.chunk_size)
    launches = problem.layout.chunk_size // block_n
    # Every launch after the first adds to the gradients. In the inputs' dtype, each addition would round them again.
    is_single_launch = len(chosen) == 1 and launches == 1
    dq, dk, dv = (
        torch.empty(x.shape, dtype=x.dtype if is_single_launch else torch.float32, device=x.device) for x in (q, k, v)
    )
    delta = torch.empty_like(lse)
    shape = {"R": problem.heads_per_group, **problem.shape}
    with on_device(q):
        for first_key in range(0, launches * block_n, block_n):
            triton_backward.differentiate_local[slots, num_groups](
                q, k, v, out, grad, lse, delta, dq, dk, dv, problem.table, rows, problem.scale,
                FIRST_KEY=first_key, LOCAL=problem.local, **problem.key_loop_options(local_tiles), **shape,
            )  # fmt: skip
        for chosen_gr in chosen:
            order = order_by_chunk(problem, chosen_gr)
            segments = cut_into_segments(problem, order, backward_segment(problem), chosen_gr.numel())
            parts = torch.empty(
                max(segments.num_parts, 1), 2, block_n, problem.head_dim, dtype=torch.float32, device=q.device
            )
            for first_key in range(0, launches * block_n, block_n):
                triton_backward.differentiate_chosen[(len(segments.items),)](
                    q, k, v, grad, lse, delta, dq, dk, dv, parts, order.rows, segments.items,
                    rows, problem.scale,
                    FIRST_KEY=first_key, **problem.key_loop_options(chosen_tiles), **shape,
                )  # fmt: skip
                if segments.num_parts:
                    part_rows = min(32, block_n)
                    triton_backward.add_parts[len(segments.part_ends), block_n // part_rows](
                        parts, segments.part_ends, segments.part_counts, dk, dv, problem.table, slots,
                        BLOCK_N=block_n, BLOCK_ROWS=part_rows, FIRST_KEY=first_key, **problem.shape,
                    )  # fmt: skip
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
