"""Softmax and sparse attention in plain torch, computed for one block of queries at a time.

The full [t, s] score matrix is never materialized. Chunk (or block) c holds the keys c * size to (c + 1) * size - 1.
Shape suffixes: b batch, t query, s key, h query head, g key and value head, n chunk, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .mixer_selectron import full_precision

MAX_SCORES = 2**26
"""Maximum number of attention scores of one block of queries."""

MAX_QUERIES = 1024
ALWAYS_SELECTED = 3
"""Number of blocks that Native Sparse Attention selects for every query: the query's block, the block before it and
block 0."""


@dataclass(frozen=True)
class Block:
    """Consecutive queries with the keys and values that at least one of these queries can attend to.

    Attributes:
        q_bthd: queries [b, t, h, d].
        k_bsgd: keys [b, s, g, d].
        v_bsgd: values [b, s, g, d].
        queries_t: positions of the queries in the sequence of all keys, int64 [t].
        keys_s: positions of these keys in the sequence of all keys, int64 [s].
    """

    q_bthd: Tensor
    k_bsgd: Tensor
    v_bsgd: Tensor
    queries_t: Tensor
    keys_s: Tensor

    def visible(self, window: int | None = None) -> Tensor:
        """Return the causal mask, bool [t, s].

        Args:
            window: number of keys that a query attends to, including the key of its own position; None: no limit.
        """
        t, s = self.queries_t[:, None], self.keys_s
        return s <= t if window is None else (s <= t) & (s > t - window)

    def products(self, keys_bngd: Tensor | None = None) -> Tensor:
        """Return the unscaled products of the queries with keys, fp32 [b, h, t, s].

        Args:
            keys_bngd: vectors to use instead of this block's keys, such as the mean key of each chunk; None: the keys.
        """
        k_bsgd = self.k_bsgd if keys_bngd is None else keys_bngd
        q_bgrtd = self.q_bthd.float().unflatten(2, (k_bsgd.shape[2], -1)).permute(0, 2, 3, 1, 4)
        return (q_bgrtd @ k_bsgd.float().permute(0, 2, 3, 1)[:, :, None]).flatten(1, 2)


def _blocks(q_bthd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, window: int | None = None) -> Iterator[Block]:
    """Yield consecutive blocks of queries. The last query is at the position of the last key."""
    b, t, h, _ = q_bthd.shape
    offset = k_bsgd.shape[1] - t
    size = min(max(MAX_SCORES // (b * h * k_bsgd.shape[1]), 1), MAX_QUERIES)
    positions = torch.arange(k_bsgd.shape[1], device=q_bthd.device)
    for start in range(0, t, size):
        end = min(start + size, t)
        keys = slice(0 if window is None else max(offset + start - window + 1, 0), offset + end)
        queries = slice(offset + start, offset + end)
        yield Block(q_bthd[:, start:end], k_bsgd[:, keys], v_bsgd[:, keys], positions[queries], positions[keys])


def _map_blocks(attend: Callable[[Block], Tensor], blocks: Iterator[Block]) -> Tensor:
    return torch.cat([attend(block) for block in blocks], 1)


def _attend(
    q_bthd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, mask: Tensor | None, scale: float, *, causal: bool = False
) -> Tensor:
    """Return softmax attention over the keys that the mask allows, [b, t, h, d].

    The mask is bool or an additive bias, [b or 1, h or 1, t, s]. None allows all keys.
    """
    out_bhtd = F.scaled_dot_product_attention(
        q_bthd.transpose(1, 2),
        k_bsgd.transpose(1, 2),
        v_bsgd.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=q_bthd.shape[2] != k_bsgd.shape[2],
    )
    return out_bhtd.transpose(1, 2)


@full_precision
def softmax_attention(
    q_bthd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, *, scale: float, window: int | None, slopes_h: Tensor | None
) -> Tensor:
    """Compute causal softmax attention, with an optional sliding window and optional ALiBi biases (arXiv 2108.12409).

    Args:
        q_bthd: queries [b, t, h, d].
        k_bsgd: keys [b, s, g, d]. The last t keys have the positions of the queries.
        v_bsgd: values [b, s, g, d].
        scale: factor on the products.
        window: number of keys that a query attends to, including the key of its own position; None: no limit.
        slopes_h: ALiBi slopes [h]: the bias of a key is -slope times its distance; None: no ALiBi.

    Returns:
        [b, t, h, d] in the dtype of the values.
    """
    t, s = q_bthd.shape[1], k_bsgd.shape[1]
    if slopes_h is None and (t == 1 or t == s) and (window is None or s <= window):
        return _attend(q_bthd, k_bsgd, v_bsgd, None, scale, causal=t > 1)

    def attend(block: Block) -> Tensor:
        visible_ts = block.visible(window)
        if slopes_h is None:
            return _attend(block.q_bthd, block.k_bsgd, block.v_bsgd, visible_ts, scale)
        distance_ts = block.queries_t[:, None] - block.keys_s
        bias_hts = (-slopes_h[:, None, None] * distance_ts).masked_fill(~visible_ts, -torch.inf)
        # A 16-bit type cannot represent large distances, so everything is computed in fp32.
        q, k, v = (x.float() for x in (block.q_bthd, block.k_bsgd, block.v_bsgd))
        return _attend(q, k, v, bias_hts[None], scale).to(v_bsgd.dtype)

    return _map_blocks(attend, _blocks(q_bthd, k_bsgd, v_bsgd, window))


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """Return the ALiBi slopes 2^(-8 i / n), i = 1..n, fp32 [h].

    If n is not a power of two, let m be the next lower power of two. The result then has the slopes for m heads,
    followed by the first n - m of every second slope for 2 m heads.
    """
    lower = 1 << (num_heads.bit_length() - 1)

    def geometric(n: int) -> list[float]:
        return [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]

    slopes = geometric(lower) + geometric(2 * lower)[0::2][: num_heads - lower]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


@full_precision
def top1_element(q_bthd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, *, scale: float, estimator: str) -> Tensor:
    """Return for each query the value of the key that has the highest product with the query (arXiv 2505.18522).

    Among equal products the key with the lowest position is selected.

    Args:
        q_bthd: queries [b, t, h, d].
        k_bsgd: keys [b, s, g, d]. The last t keys have the positions of the queries.
        v_bsgd: values [b, s, g, d].
        scale: factor on the products in the softmax whose gradient is used.
        estimator: gradient estimator. `straight_through`: the gradient of the softmax weights. `selected`: the gradient
            of the log probability of the selected key.

    Returns:
        [b, t, h, d] in the dtype of the values.
    """

    def attend(block: Block) -> Tensor:
        products = block.products().masked_fill(~block.visible(), -torch.inf)
        best_bht1 = products.argmax(-1, keepdim=True)
        v_bhsd = block.v_bsgd.transpose(1, 2).repeat_interleave(block.q_bthd.shape[2] // block.v_bsgd.shape[2], 1)
        if not (torch.is_grad_enabled() and (products.requires_grad or v_bhsd.requires_grad)):
            return v_bhsd.gather(2, best_bht1.expand(-1, -1, -1, v_bhsd.shape[-1])).transpose(1, 2)
        weights = _weights_with_gradient(products * scale, best_bht1, estimator)
        return (weights @ v_bhsd.float()).to(v_bhsd.dtype).transpose(1, 2)

    return _map_blocks(attend, _blocks(q_bthd, k_bsgd, v_bsgd))


def _weights_with_gradient(scores_bhts: Tensor, best_bht1: Tensor, estimator: str) -> Tensor:
    """Return weights [b, h, t, s] that are 1 at the best key and 0 elsewhere, with the gradient of the estimator."""
    if estimator == "straight_through":
        p = scores_bhts.softmax(-1)
        return torch.zeros_like(p).scatter(-1, best_bht1, 1.0) + (p - p.detach())
    log_p = scores_bhts.log_softmax(-1).gather(-1, best_bht1)
    return torch.zeros_like(scores_bhts).scatter(-1, best_bht1, (log_p - log_p.detach()).exp())


def _chunk_means(x_bsgd: Tensor, size: int) -> Tensor:
    """Return the mean row of each complete chunk of `size` rows, fp32 [b, s // size, g, d]."""
    num_chunks = x_bsgd.shape[1] // size
    return x_bsgd[:, : num_chunks * size].float().unflatten(1, (num_chunks, size)).mean(2)


@full_precision
def top1_chunk(
    q_bthd: Tensor,
    k_bsgd: Tensor,
    v_bsgd: Tensor,
    *,
    scale: float,
    chunk_size: int,
    top_k: int,
    score: str,
    local: bool,
) -> Tensor:
    """Attend with one softmax to the query's own chunk and to the best complete earlier chunks (arXiv 2505.18522).

    Args:
        q_bthd: queries [b, t, h, d].
        k_bsgd: keys [b, s, g, d] from the start of the sequence. The last t keys have the positions of the queries.
        v_bsgd: values [b, s, g, d].
        scale: factor on the products.
        chunk_size: keys per chunk.
        top_k: number of earlier chunks that a query selects. Among equal scores the earliest chunk is selected.
        score: score of a chunk for a query: the product of the query with the chunk's mean key (`approx`), the highest
            product with a key of the chunk (`exact`), or the logsumexp of the scaled products with the chunk's keys
            (`exact_lse`).
        local: True if a query attends to its own chunk. Queries in chunk 0 always do so.

    Returns:
        [b, t, h, d] in the dtype of the values.
    """
    means_bngd = _chunk_means(k_bsgd, chunk_size) if score == "approx" else None

    def attend(block: Block) -> Tensor:
        query_chunk_t = block.queries_t // chunk_size
        with torch.no_grad():
            scores_bhtn = _chunk_scores(block, chunk_size, score, scale, means_bngd)
            selected_bhtn = _best_chunks(scores_bhtn, query_chunk_t, top_k)
        key_chunk_s = block.keys_s // chunk_size
        own_chunk_ts = block.visible() & (key_chunk_s == query_chunk_t[:, None])
        if not local:
            own_chunk_ts = own_chunk_ts & (query_chunk_t == 0)[:, None]
        # The mask is padded by one chunk, which the keys of an incomplete last chunk index.
        mask_bhts = F.pad(selected_bhtn, (0, 1))[..., key_chunk_s] | own_chunk_ts
        return _attend(block.q_bthd, block.k_bsgd, block.v_bsgd, mask_bhts, scale)

    return _map_blocks(attend, _blocks(q_bthd, k_bsgd, v_bsgd))


def _chunk_scores(block: Block, size: int, score: str, scale: float, means_bngd: Tensor | None) -> Tensor:
    """Return the score of each complete chunk for each query, fp32 [b, h, t, n]."""
    num_chunks = len(block.keys_s) // size
    if means_bngd is not None:
        return block.products(means_bngd[:, :num_chunks])
    products = block.products(block.k_bsgd[:, : num_chunks * size]).unflatten(-1, (num_chunks, size))
    return products.amax(-1) if score == "exact" else (products * scale).logsumexp(-1)


def _best_chunks(scores_bhtn: Tensor, query_chunk_t: Tensor, count: int) -> Tensor:
    """Return the mask of the selected chunks among the chunks before the query's own chunk, bool [b, h, t, n]."""
    earlier_tn = torch.arange(scores_bhtn.shape[-1], device=query_chunk_t.device) < query_chunk_t[:, None]
    # A stable sort, because topk guarantees no order among equal scores.
    order = scores_bhtn.masked_fill(~earlier_tn, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    selected = torch.zeros_like(scores_bhtn, dtype=torch.bool).scatter(-1, order[..., :count], True)
    return selected & earlier_tn


@full_precision
def native_sparse_attention(
    q_bthd: Tensor,
    k_bsgd: Tensor,
    v_bsgd: Tensor,
    gates_bthx: Tensor,
    *,
    scale: float,
    block_size: int,
    num_selected: int,
    window: int,
) -> Tensor:
    """Return a gated sum of attention to mean blocks, to selected blocks and to a sliding window (arXiv 2502.11089).

    Args:
        q_bthd: queries [b, t, h, d]; the query heads of a group share their selection.
        k_bsgd: keys [b, s, g, d] from the start of the sequence. The last t keys have the positions of the queries.
        v_bsgd: values [b, s, g, d].
        gates_bthx: gates of the three branches, fp32 [b, t, h, 3].
        scale: factor on the products.
        block_size: keys per block.
        num_selected: number of blocks of the selection branch, including the `ALWAYS_SELECTED` blocks.
        window: number of keys of the sliding-window branch.

    Returns:
        [b, t, h, d] in the dtype of the values.
    """
    mean_keys, mean_values = _chunk_means(k_bsgd, block_size), _chunk_means(v_bsgd, block_size)
    count = max(num_selected, ALWAYS_SELECTED)

    def attend(block: Block) -> Tensor:
        p_bhtn = _mean_block_probabilities(block, mean_keys, block_size, scale)
        compressed_bhtd = p_bhtn @ mean_values.transpose(1, 2).repeat_interleave(block.q_bthd.shape[2] // num_groups, 1)
        # In fp32, so that the sum of the branches is rounded only once.
        q, k, v = (x.float() for x in (block.q_bthd, block.k_bsgd, block.v_bsgd))
        selected = _attend(q, k, v, _selected_keys(block, p_bhtn.detach(), block_size, count), scale)
        recent = _attend(q, k, v, block.visible(window), scale)
        return torch.stack([compressed_bhtd.transpose(1, 2), selected, recent], -1)

    num_groups = k_bsgd.shape[2]
    branches_bthdx = _map_blocks(attend, _blocks(q_bthd, k_bsgd, v_bsgd))
    return (branches_bthdx * gates_bthx[..., None, :]).sum(-1).to(v_bsgd.dtype)


def _mean_block_probabilities(block: Block, mean_keys_bngd: Tensor, size: int, scale: float) -> Tensor:
    """Return softmax probabilities over the blocks that end at or before the query, [b, h, t, n].

    The probabilities of a query without such a block are 0.
    """
    scores = block.products(mean_keys_bngd) * scale
    num_ended_t1 = ((block.queries_t + 1) // size)[:, None]
    ended_tn = torch.arange(scores.shape[-1], device=scores.device) < num_ended_t1
    # A softmax over no scores is NaN. For a query without such a block, no score is masked, and the result is zeroed.
    return scores.masked_fill(~(ended_tn | (num_ended_t1 == 0)), -torch.inf).softmax(-1).masked_fill(~ended_tn, 0.0)


def _selected_keys(block: Block, p_bhtn: Tensor, size: int, count: int) -> Tensor:
    """Return the mask of the keys in the selected blocks, bool [b, h, t, s].

    The query's own block, the preceding block and block 0 are selected, and then the blocks with the highest
    probabilities.
    """
    groups, query_block_t1 = block.k_bsgd.shape[2], (block.queries_t // size)[:, None]
    n = torch.arange((len(block.keys_s) - 1) // size + 1, device=p_bhtn.device)
    importance = p_bhtn.unflatten(1, (groups, -1)).sum(2)
    # Only the blocks of these keys are kept. An incomplete last block has no probability and is padded with 0.
    importance = F.pad(importance, (0, max(len(n) - importance.shape[-1], 0)))[..., : len(n)]
    always_tn = (n == query_block_t1) | (n == query_block_t1 - 1) | (n == 0)
    importance = importance.masked_fill(always_tn, torch.inf).masked_fill(n > query_block_t1, -torch.inf)
    order = importance.sort(dim=-1, descending=True, stable=True).indices
    selected = torch.zeros_like(importance, dtype=torch.bool).scatter(-1, order[..., :count], True) & (
        n <= query_block_t1
    )
    keys_bgts = selected[..., block.keys_s // size] & block.visible()
    return keys_bgts.repeat_interleave(block.q_bthd.shape[2] // groups, 1)
