"""Floating-point operations and bytes that an op requires, independent of the kernel.

A multiplication and an addition are two operations. Softmax, maxima and means are ignored, as usual for attention,
because they take about 1/d of the operations of the products, with head dim d. "Pairs" are pairs of a query and a key
or chunk, for one head of one sequence of `length` tokens.
"""

from typing import NamedTuple

from kernels.bench.cases import Pass, Shape

BYTES = 2
"""Bytes per element: bf16."""

BACKWARD = 2.5
"""Ratio of backward to forward operations of softmax attention: five products (q.k again, dp, dq, dk, dv) to two.

The convention of FlashAttention-2 (arXiv 2307.08691, section 4.1)."""


class Operations(NamedTuple):
    """Floating-point operations of the whole batch."""

    forward: float
    forward_backward: float

    def for_pass(self, pass_name: Pass) -> float:
        """Return the operations of a pass."""
        return self.forward if pass_name == "forward" else self.forward_backward


def causal_pairs(length: int) -> int:
    """Count the pairs of queries and keys up to the query: about length^2 / 2."""
    return length * (length + 1) // 2


def window_pairs(length: int, window: int) -> int:
    """Count the pairs of queries and their last `window` keys, including their own."""
    short = min(length, window)
    return causal_pairs(short) + (length - short) * window


def own_chunk_pairs(length: int, chunk_size: int) -> int:
    """Count the pairs of queries and keys of their own chunk up to the query: about length * chunk_size / 2."""
    return length // chunk_size * causal_pairs(chunk_size) + causal_pairs(length % chunk_size)


def earlier_chunks(length: int, chunk_size: int, max_chunks: int | None = None) -> int:
    """Count the pairs of queries and complete earlier chunks, with at most `max_chunks` chunks per query.

    Without that limit: about length^2 / chunk_size / 2.
    """
    whole, remainder = divmod(length, chunk_size)
    if max_chunks is None:
        max_chunks = whole
    # The first min(whole, max_chunks) chunks have 0, 1, ... earlier chunks, the later ones at least `max_chunks`.
    num_short = min(whole, max_chunks)
    return chunk_size * (num_short * (num_short - 1) // 2 + (whole - num_short) * max_chunks) + remainder * min(
        whole, max_chunks
    )


def complete_block_pairs(length: int, block_size: int) -> int:
    """Count the pairs of queries and blocks that end at or before them."""
    whole, remainder = divmod(length, block_size)
    return block_size * (whole * (whole - 1) // 2) + whole * (remainder + 1)


def products(shape: Shape, pairs: int, count: int) -> float:
    """Return the operations of `count` matrix products over all heads' pairs: 2 * head_dim per pair and product."""
    return 2.0 * count * pairs * shape.head_dim * shape.heads * shape.batch


def _softmax_attention(shape: Shape, pairs: int, scoring: float = 0.0) -> Operations:
    forward = products(shape, pairs, 2)
    return Operations(scoring + forward, scoring + (1 + BACKWARD) * forward)


def causal_attention(shape: Shape) -> Operations:
    """Count causal attention: forward q.k and p.v, 2 * 2 * length^2 / 2 * head_dim a head; backward 2.5 times that."""
    return _softmax_attention(shape, causal_pairs(shape.length))


def window_attention(shape: Shape, window: int) -> Operations:
    """Count causal attention over the last `window` keys."""
    return _softmax_attention(shape, window_pairs(shape.length, window))


def top1_chunk(shape: Shape, score: str, chunk_size: int, top_k: int) -> Operations:
    """Count scoring and attention over the own and the chosen chunks; scoring has no backward pass.

    Scoring: "approx" takes one product with every earlier chunk's mean, 2 * head_dim * length * (length / chunk_size) /
    2 per head; "exact" and "exact_lse" one with every earlier key, 2 * head_dim * length^2 / 2. Attention: 4 * head_dim
    * length * (chunk_size / 2 + top_k * chunk_size), backward 2.5 times that.
    """
    chunks = earlier_chunks(shape.length, chunk_size)
    scoring = products(shape, chunks * (1 if score == "approx" else chunk_size), 1)
    chosen = earlier_chunks(shape.length, chunk_size, top_k) * chunk_size
    return _softmax_attention(shape, own_chunk_pairs(shape.length, chunk_size) + chosen, scoring)


def top1_element(shape: Shape, estimator: str) -> Operations:
    """Count one product, q.k, for inference; training adds what the estimator's gradient needs.

    "straight_through": p.v in the forward pass (the row sum of p * dp is dot(do, p.v)), and q.k, dp, dq, dk in the
    backward pass; dv is a scatter. "selected": q.k, dq, dk in the backward pass, as dp is one number per query.
    """
    pairs = causal_pairs(shape.length)
    return Operations(products(shape, pairs, 1), products(shape, pairs, 6 if estimator == "straight_through" else 4))


def native_sparse_attention(shape: Shape, block_size: int, block_count: int) -> Operations:
    """Count attention to block means, their scores again for the selection, and attention to the selected blocks.

    Source: Yuan et al. 2025 (arXiv 2502.11089) as in fla, without the window; the last selected block is the own one.
    """
    compressed = complete_block_pairs(shape.length, block_size)
    chosen = earlier_chunks(shape.length, block_size, block_count - 1) * block_size
    chosen += own_chunk_pairs(shape.length, block_size)
    return _softmax_attention(shape, compressed + chosen, products(shape, compressed, 1))


def query_bytes(shape: Shape) -> int:
    """Return the bytes of q, which equal those of o."""
    return BYTES * shape.tokens * shape.heads * shape.head_dim


def key_bytes(shape: Shape) -> int:
    """Return the bytes of k, which equal those of v."""
    return BYTES * shape.tokens * shape.groups * shape.head_dim


def traffic_bytes(shape: Shape, pass_name: Pass) -> int:
    """Return the memory traffic in bytes if each input of a pass is read once and each output is written once.

    Forward: q, k, v; o. Backward: q, k, v, o, do; dq, dk, dv. Both: their sum, because do exists only after o.
    """
    forward = 2 * query_bytes(shape) + 2 * key_bytes(shape)
    backward = 4 * query_bytes(shape) + 4 * key_bytes(shape)
    return forward if pass_name == "forward" else forward + backward


def baseline_bytes(shape: Shape, pass_name: Pass) -> int:
    """Return the bytes of q, k, v and o, with their gradients for a backward pass: the baseline for memory."""
    return (2 * query_bytes(shape) + 2 * key_bytes(shape)) * (1 if pass_name == "forward" else 2)


def result_bytes(shape: Shape, pass_name: Pass) -> int:
    """Return the bytes of a pass's results: o, and dq, dk, dv for a backward pass."""
    gradients = query_bytes(shape) + 2 * key_bytes(shape)
    return query_bytes(shape) + (0 if pass_name == "forward" else gradients)
