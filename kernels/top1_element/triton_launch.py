"""Launch sequence, tile sizes and buffers of the Triton kernels of Top-1 Element attention."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.triton_math import Tiles, next_power_of_two, on_device
from kernels.top1_element import triton_backward, triton_forward
from kernels.top1_element.ranges import Ranges, Shape

TILES = {
    ("choose", "narrow"): Tiles(128, 64, 8, 3),
    ("choose", "wide"): Tiles(128, 64, 8, 2),
    ("choose", "fp32"): Tiles(32, 32, 4, 1),
    ("forward", "narrow"): Tiles(128, 64, 8, 3),
    ("forward", "wide"): Tiles(128, 64, 8, 2),
    ("forward", "fp32"): Tiles(32, 32, 4, 1),
    ("queries", "narrow"): Tiles(128, 64, 8, 3),
    ("queries", "wide"): Tiles(64, 64, 8, 2),
    ("queries", "fp32"): Tiles(16, 32, 8, 1),
    ("keys", "narrow"): Tiles(64, 128, 8, 2),
    ("keys", "wide"): Tiles(32, 64, 8, 2),
    ("keys", "fp32"): Tiles(16, 32, 4, 1),
}
"""Tile sizes by kernel and width. A head dim up to 128 is narrow. "choose" is the forward pass without soft output.

The narrow tile sizes are the fastest of about ten on an H200 with head dim 128. The other tile sizes do not spill
registers, but were not timed.
"""


class Problem(NamedTuple):
    """Shapes of one call. Tensors are flat: q [tokens, hq, d], k and v [key tokens, hkv, d]."""

    ranges: Ranges
    shape: Shape
    num_heads: int
    num_groups: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    estimator: str

    @property
    def query_tokens(self) -> int:
        """Number of queries in all rows of the batch."""
        return self.shape.batch * self.shape.num_queries

    def tiles(self, kernel: str) -> Tiles:
        """Return a kernel's tile sizes, with at most as many rows as there are queries."""
        width = "fp32" if self.dtype == torch.float32 else "wide" if self.head_dim > 128 else "narrow"
        tiles = TILES[kernel, width]
        return tiles._replace(block_m=min(tiles.block_m, max(16, next_power_of_two(self.shape.num_queries))))

    def constants(self, tiles: Tiles) -> dict[str, int | None]:
        """Return the compile-time arguments and launch options of every kernel."""
        return {
            "G": self.num_groups,
            "R": self.num_heads // self.num_groups,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": max(16, next_power_of_two(self.head_dim)),
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            **tiles.launch(),
        }


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, training: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the forward kernel.

    Args:
        problem: shapes.
        q, k, v: flat inputs.
        training: True to compute the outputs that the backward pass needs.

    Returns:
        out: [tokens, hq, d].
        soft: softmax-weighted values [tokens, hq, d] in v's dtype; empty unless the gradient needs them.
        lse: fp32 [hq, tokens], log-sum-exp in units of log2; empty unless training.
        chosen: int32 [hq, tokens], flat token of the selected key.
    """
    mixes = training and problem.estimator == "straight_through"
    out = torch.empty_like(q)
    soft = torch.empty_like(q) if mixes else q.new_empty(0)
    rows = (problem.num_heads, problem.query_tokens)
    lse = torch.empty(rows if training else 0, dtype=torch.float32, device=q.device)
    chosen = torch.empty(rows, dtype=torch.int32, device=q.device)
    tiles = problem.tiles("forward" if mixes else "choose")
    blocks = -(-problem.shape.num_queries // tiles.block_m)
    with on_device(q):
        triton_forward.attend[problem.shape.batch * blocks, problem.num_heads](
            q, k, v, out, soft, lse, chosen, problem.ranges.first_key, problem.ranges.own_key,
            problem.query_tokens, problem.shape.num_queries, blocks, problem.scale / math.log(2),
            SUM=training, SOFT=mixes, **problem.constants(tiles),
        )  # fmt: skip
    return out, soft, lse, chosen


def backward(
    problem: Problem, lse: Tensor, chosen: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv) in the inputs' dtype. `mixed` is `soft`, or `out` for "selected"."""
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    delta = torch.empty_like(lse)
    selected = problem.estimator == "selected"
    tiles = problem.tiles("queries")
    blocks = -(-problem.shape.num_queries // tiles.block_m)
    with on_device(q):
        triton_backward.differentiate_queries[problem.shape.batch * blocks, problem.num_heads](
            q, k, v, grad, mixed, lse, delta, chosen, dq, problem.ranges.first_key, problem.ranges.own_key,
            problem.query_tokens, problem.shape.num_queries, blocks, problem.scale,
            SELECTED=selected, **problem.constants(tiles),
        )  # fmt: skip
        tiles = problem.tiles("keys")
        blocks = -(-problem.shape.num_keys // tiles.block_n)
        triton_backward.differentiate_keys[problem.shape.batch * blocks, problem.num_groups](
            q, k, v, grad, lse, delta, chosen, dk, dv, problem.ranges.first_query, problem.ranges.end_query,
            problem.query_tokens, problem.shape.num_keys, blocks, problem.scale,
            SELECTED=selected, **problem.constants(tiles),
        )  # fmt: skip
    return dq, dk, dv
