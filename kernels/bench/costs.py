"""What an op must do, counted: floating-point operations and bytes. No kernel's own waste is in here.

A multiplication and an addition are two operations. Softmax, maxima and means are left out, as usual for attention:
they are a d-th of the products. "Pairs" are counted for one head of one sequence of `length` tokens.
"""

from typing import NamedTuple

from kernels.bench.cases import Pass, Shape

BYTES = 2
"""Of an element: bf16."""

BACKWARD = 2.5
"""Backward of softmax attention over its forward: five products (q.k again, dp, dq, dk, dv) where the forward has two.

The convention of FlashAttention-2 (arXiv 2307.08691, section 4.1)."""


class Operations(NamedTuple):
    """Floating-point operations of the whole batch."""

    forward: float
    forward_backward: float

    def of(self, which: Pass) -> float:
        """Those of a pass."""
        return self.forward if which == "forward" else self.forward_backward


def causal_pairs(length: int) -> int:
    """Queries with the keys up to their own: about length^2 / 2."""
    return length * (length + 1) // 2


def window_pairs(length: int, window: int) -> int:
    """Queries with the last `window` keys, their own included."""
    short = min(length, window)
    return causal_pairs(short) + (length - short) * window


def own_chunk_pairs(length: int, chunk_size: int) -> int:
    """Queries with the keys of their own chunk up to themselves: about length * chunk_size / 2."""
    return length // chunk_size * causal_pairs(chunk_size) + causal_pairs(length % chunk_size)


def earlier_chunks(length: int, chunk_size: int, most: int | None = None) -> int:
    """Queries with the complete chunks before their own, `most` at most: about length * (length / chunk_size) / 2."""
    whole, rest = divmod(length, chunk_size)
    if most is None:
        most = whole
    # Of the whole chunks, the first min(whole, most) see 0, 1, ... earlier ones; the others see `most`.
    few = min(whole, most)
    return chunk_size * (few * (few - 1) // 2 + (whole - few) * most) + rest * min(whole, most)


def complete_block_pairs(length: int, block_size: int) -> int:
    """Queries with the blocks that end at or before them."""
    whole, rest = divmod(length, block_size)
    return block_size * (whole * (whole - 1) // 2) + whole * (rest + 1)


def products(shape: Shape, pairs: int, count: int) -> float:
    """Operations of `count` matrix products over the pairs of every head: 2 * head_dim a pair and product."""
    return 2.0 * count * pairs * shape.head_dim * shape.heads * shape.batch


def _softmax_attention(shape: Shape, pairs: int, scoring: float = 0.0) -> Operations:
    forward = products(shape, pairs, 2)
    return Operations(scoring + forward, scoring + (1 + BACKWARD) * forward)


def causal_attention(shape: Shape) -> Operations:
    """Forward q.k and p.v: 2 * 2 * length^2 / 2 * head_dim a head; backward 2.5 times that."""
    return _softmax_attention(shape, causal_pairs(shape.length))


def window_attention(shape: Shape, window: int) -> Operations:
    """As causal attention, over the last `window` keys."""
    return _softmax_attention(shape, window_pairs(shape.length, window))


def top1_chunk(shape: Shape, score: str, chunk_size: int, top_k: int) -> Operations:
    """Scoring and attention over the own and the chosen chunks; the choice is a constant, so scoring has no backward.

    Scoring: "approx" one product with every earlier chunk's mean, 2 * head_dim * length * (length / chunk_size) / 2 a
    head; "exact" and "exact_lse" one with every earlier key, 2 * head_dim * length^2 / 2. Attention: 4 * head_dim *
    length * (chunk_size / 2 + top_k * chunk_size), backward 2.5 times that.
    """
    chunks = earlier_chunks(shape.length, chunk_size)
    scoring = products(shape, chunks * (1 if score == "approx" else chunk_size), 1)
    chosen = earlier_chunks(shape.length, chunk_size, top_k) * chunk_size
    return _softmax_attention(shape, own_chunk_pairs(shape.length, chunk_size) + chosen, scoring)


def top1_element(shape: Shape, estimator: str) -> Operations:
    """Inference: one product, q.k. Training adds what the estimator's gradient needs.

    "straight_through": p.v in the forward (the row sum of p * dp is dot(do, p.v)) and q.k, dp, dq, dk in the backward;
    dv is a scatter. "selected": q.k, dq, dk in the backward, as dp is one number a query.
    """
    pairs = causal_pairs(shape.length)
    return Operations(products(shape, pairs, 1), products(shape, pairs, 6 if estimator == "straight_through" else 4))


def native_sparse_attention(shape: Shape, block_size: int, block_count: int) -> Operations:
    """Attention to the means of complete blocks, their scores again for the choice, attention to the chosen blocks.

    Source: Yuan et al. 2025 (arXiv 2502.11089) in fla's form, without its window; the last chosen block is the own one.
    """
    compressed = complete_block_pairs(shape.length, block_size)
    chosen = earlier_chunks(shape.length, block_size, block_count - 1) * block_size
    chosen += own_chunk_pairs(shape.length, block_size)
    return _softmax_attention(shape, compressed + chosen, products(shape, compressed, 1))


def query_bytes(shape: Shape) -> int:
    """Bytes of q, and of o."""
    return BYTES * shape.tokens * shape.heads * shape.head_dim


def key_bytes(shape: Shape) -> int:
    """Bytes of k, and of v."""
    return BYTES * shape.tokens * shape.groups * shape.head_dim


def moved_bytes(shape: Shape, which: Pass) -> int:
    """Bytes to and from memory, each input of a pass read once and each of its outputs written once.

    Forward: q, k, v; o. Backward: q, k, v, o, do; dq, dk, dv. Both: their sum, as o is complete before do is there.
    """
    forward = 2 * query_bytes(shape) + 2 * key_bytes(shape)
    backward = 4 * query_bytes(shape) + 4 * key_bytes(shape)
    return forward if which == "forward" else forward + backward


def held_bytes(shape: Shape, which: Pass) -> int:
    """Bytes of q, k, v and o, with their gradients where the pass has them: what memory is compared with."""
    return (2 * query_bytes(shape) + 2 * key_bytes(shape)) * (1 if which == "forward" else 2)


def result_bytes(shape: Shape, which: Pass) -> int:
    """Bytes of what a pass returns: o, and dq, dk, dv."""
    gradients = query_bytes(shape) + 2 * key_bytes(shape)
    return query_bytes(shape) + (0 if which == "forward" else gradients)
