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
    place = tl.arange(0, values.shape[1])[None, :]
    worst = tl.min(tl.where(slots < 0, -float("inf"), values), 1)
    rank = tl.where(slots < 0, MAX_INT32 - place, tl.where(values == worst[:, None], slots, -1))
    highest = tl.max(rank, 1)
    has_room = tl.min(slots, 1) < 0
    taken = (slot >= 0) & ((score > worst) | has_room)
    here = (rank == highest[:, None]) & taken[:, None]
    return tl.where(here, score[:, None], values), tl.where(here, slot[:, None], slots)


@triton.jit
def insert_tile(values, slots, scores, first):
    """Insert a tile of scores [M, N] of the slots first .. first + N - 1 into the lists; -inf marks a missing slot."""
    n = first + tl.arange(0, scores.shape[1])[None, :]
    left = tl.where(scores > -float("inf"), n, MAX_INT32)
    going = tl.min(left) < MAX_INT32
    while going:
        open_scores = tl.where(left < MAX_INT32, scores, -float("inf"))
        best = tl.max(open_scores, 1)
        at = tl.min(tl.where(open_scores == best[:, None], left, MAX_INT32), 1)
        worst = tl.min(tl.where(slots < 0, -float("inf"), values), 1)
        useful = (at < MAX_INT32) & ((best > worst) | (tl.min(slots, 1) < 0))
        values, slots = insert(values, slots, best, tl.where(useful, at, -1))
        left = tl.where(left == at[:, None], MAX_INT32, left)
        left = tl.where(useful[:, None], left, MAX_INT32)
        going = tl.min(left) < MAX_INT32
    return values, slots


@triton.jit
def store_list(chosen, scores, values, slots, row, valid, stride, TOP_K: tl.constexpr, SCORES: tl.constexpr):
    """Store each row's list to chosen[r * stride + row] and `scores`, best first; the lowest slot wins a tie."""
    for r in tl.static_range(TOP_K):
        best = tl.max(tl.where(slots < 0, -float("inf"), values), 1)
        at = tl.min(tl.where((slots >= 0) & (values == best[:, None]), slots, MAX_INT32), 1)
        tl.store(chosen + r * stride + row, tl.where(at == MAX_INT32, -1, at), mask=valid)
        if SCORES:
            tl.store(scores + r * stride + row, best, mask=valid)
        slots = tl.where(slots == at[:, None], -1, slots)
