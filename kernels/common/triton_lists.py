"""Top-k lists per row, kept in registers, in Triton.

An entry is a slot index with its value. An empty entry has slot -1.
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.common.triton_math import MAX_INT32


@triton.jit
def insert(values, slots, score, slot):
    """Insert a slot into each row's list if it beats the worst entry: values and slots [M, K], score and slot [M].

    An empty entry (slot -1) is the worst. Among equal values, the entry with the highest slot is the worst. Slots must
    be inserted in ascending order, so a new slot does not replace an entry with an equal value.
    """
    position = tl.arange(0, values.shape[1])[None, :]
    worst = tl.min(tl.where(slots < 0, -float("inf"), values), 1)
    rank = tl.where(slots < 0, MAX_INT32 - position, tl.where(values == worst[:, None], slots, -1))
    highest = tl.max(rank, 1)
    has_empty = tl.min(slots, 1) < 0
    is_inserted = (slot >= 0) & ((score > worst) | has_empty)
    is_replaced = (rank == highest[:, None]) & is_inserted[:, None]
    return tl.where(is_replaced, score[:, None], values), tl.where(is_replaced, slot[:, None], slots)


@triton.jit
def insert_tile(values, slots, scores, first):
    """Insert a tile of scores [M, N] of the slots first .. first + N - 1 into the lists; -inf marks a missing slot."""
    n = first + tl.arange(0, scores.shape[1])[None, :]
    remaining = tl.where(scores > -float("inf"), n, MAX_INT32)
    has_remaining = tl.min(remaining) < MAX_INT32
    while has_remaining:
        remaining_scores = tl.where(remaining < MAX_INT32, scores, -float("inf"))
        best = tl.max(remaining_scores, 1)
        best_slot = tl.min(tl.where(remaining_scores == best[:, None], remaining, MAX_INT32), 1)
        worst = tl.min(tl.where(slots < 0, -float("inf"), values), 1)
        is_useful = (best_slot < MAX_INT32) & ((best > worst) | (tl.min(slots, 1) < 0))
        values, slots = insert(values, slots, best, tl.where(is_useful, best_slot, -1))
        remaining = tl.where(remaining == best_slot[:, None], MAX_INT32, remaining)
        remaining = tl.where(is_useful[:, None], remaining, MAX_INT32)
        has_remaining = tl.min(remaining) < MAX_INT32
    return values, slots


@triton.jit
def store_list(chosen, scores, values, slots, row, valid, stride, TOP_K: tl.constexpr, SCORES: tl.constexpr):
    """Store each row's list to chosen[r * stride + row] and `scores`, best first; the lowest slot wins a tie."""
    for r in tl.static_range(TOP_K):
        best = tl.max(tl.where(slots < 0, -float("inf"), values), 1)
        best_slot = tl.min(tl.where((slots >= 0) & (values == best[:, None]), slots, MAX_INT32), 1)
        tl.store(chosen + r * stride + row, tl.where(best_slot == MAX_INT32, -1, best_slot), mask=valid)
        if SCORES:
            tl.store(scores + r * stride + row, best, mask=valid)
        slots = tl.where(slots == best_slot[:, None], -1, slots)
