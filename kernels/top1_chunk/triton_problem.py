"""Shapes and tile sizes shared by all launches of one call."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.common.triton_math import Tiles, next_power_of_two
from kernels.top1_chunk.chunks import Layout

LN2 = 0.6931471805599453


class Problem(NamedTuple):
    """Shapes and options of one call. Tensors are flat: q [tokens, hq, d], k and v [tokens, hkv, d]."""

    table: Tensor
    layout: Layout
    num_heads: int
    num_groups: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    local: bool
    longest: int
    """Number of keys of the longest sample or document."""

    @property
    def heads_per_group(self) -> int:
        """Number of query heads per key head."""
        return self.num_heads // self.num_groups

    @property
    def rows(self) -> int:
        """Number of rows per key head. A row is a query of one query head."""
        return self.layout.batch * self.layout.num_queries * self.heads_per_group

    @property
    def rows_per_chunk(self) -> int:
        """Number of rows of a complete chunk per key head."""
        return self.layout.chunk_size * self.heads_per_group

    @property
    def slots(self) -> int:
        """Number of chunks of all samples or documents. A slot is an index of such a chunk in `table`."""
        return len(self.table)

    @property
    def whole_chunks(self) -> bool:
        """True if every chunk is known to be complete; False for several packed documents."""
        return self.longest == self.layout.num_keys and self.longest % self.layout.chunk_size == 0

    @property
    def shape(self) -> dict[str, int]:
        """Compile-time constants of every kernel."""
        return {"G": self.num_groups, "HEAD_DIM": self.head_dim, "BLOCK_D": max(16, next_power_of_two(self.head_dim))}

    def tiles(self, kernel: str) -> Tiles:
        """Return a kernel's tile sizes for this dtype and head dim, with no more rows than a chunk needs."""
        width = "small" if self.head_dim <= 64 else "narrow" if self.head_dim <= 128 else "wide"
        chosen = TILES[kernel, "fp32" if self.dtype == torch.float32 else width]
        block_m = min(chosen.block_m, max(16, next_power_of_two(self.rows_per_chunk)))
        return chosen._replace(block_m=block_m)

    def row_tiles(self, block_m: int) -> int:
        """Return the number of tiles of the rows of one chunk."""
        return -(-self.rows_per_chunk // block_m)

    def key_loop_options(self, tiles: Tiles) -> dict[str, Any]:
        """Return the constants and launch options of a kernel that iterates over a chunk's keys."""
        block_n = min(tiles.block_n, self.layout.chunk_size)
        return {"BLOCK_M": tiles.block_m, "BLOCK_N": block_n, **tiles.launch()}

    def with_heads(self, count: int) -> "Problem":
        """Return the problem restricted to `count` key heads."""
        return self._replace(num_heads=count * self.heads_per_group, num_groups=count)


TILES = {
    ("mean", "small"): Tiles(16, 128, 2, 1),
    ("mean", "narrow"): Tiles(16, 128, 2, 1),
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
    ("screen", "small"): Tiles(128, 128, 4, 3),
    ("screen", "narrow"): Tiles(128, 128, 4, 3, 168),
    ("screen", "wide"): Tiles(128, 128, 8, 2),
    ("recheck", "small"): Tiles(64, 128, 4, 3),
    ("recheck", "narrow"): Tiles(64, 128, 4, 3),
    ("recheck", "wide"): Tiles(64, 64, 4, 1),
    ("local", "small"): Tiles(64, 32, 4, 4),
    ("local", "narrow"): Tiles(64, 32, 4, 3, 144),
    ("local", "wide"): Tiles(64, 32, 4, 2),
    ("local", "fp32"): Tiles(32, 32, 4, 1),
    ("chosen", "small"): Tiles(64, 128, 4, 1, 128),
    ("chosen", "narrow"): Tiles(64, 32, 4, 2, 128),
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
"""Tile sizes by kernel and by head dim or fp32, chosen by measurements on an H200. docs/benchmarks/kernels.md lists the
alternatives.
"""
