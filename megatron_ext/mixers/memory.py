"""What a layer remembers of the positions it has seen, for decoding token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.mixers.past import Past
from megatron_ext.parallel.states import DiagonalWalk, Walk


class Memory(Past):
    """What one layer has seen so far, in this process.

    It keeps states, the last rows of convolutions, and keys and values: all of them, or those in a window.

    Attributes:
        num_positions: positions seen.
    """

    def __init__(self) -> None:
        self.num_positions = 0
        self._kept: dict[str, Tensor] = {}

    def advance(self, count: int) -> None:
        """Count the positions of a call that is done."""
        assert self._kept, "a mixer asks `Part.past` for what came before; this one cannot decode"
        self.num_positions += count

    def rows_before(self, name: str, x_tbuw: Tensor, count: int) -> Tensor:
        """See `Past.rows_before`."""
        before = self._kept.get(name)
        if before is None:
            before = x_tbuw.new_zeros(count, *x_tbuw.shape[1:])
        self._keep_last(name, torch.cat([before, x_tbuw]), count)
        return before

    def rows_so_far(self, name: str, x_tbnw: Tensor, window: int | None = None) -> Tensor:
        """See `Past.rows_so_far`."""
        rows = torch.cat([self._kept[name], x_tbnw]) if name in self._kept else x_tbnw
        self._keep_last(name, rows, len(rows) if window is None else window - 1)
        return rows

    def walk(self, name: str, walk: Walk, v_bthe: Tensor, key_dim: int) -> Tensor:
        """See `Past.walk`."""
        out, self._kept[name] = walk(v_bthe, self._kept.get(name))
        return out

    def walk_diagonal(self, name: str, walk: DiagonalWalk, kept: Tensor) -> Tensor:
        """See `Past.walk_diagonal`."""
        out, self._kept[name] = walk(self._kept.get(name))
        return out

    def _keep_last(self, name: str, rows: Tensor, count: int) -> None:
        last = rows[max(len(rows) - count, 0) :]
        # A view would hold all rows in memory, and what else the layer has projected beside them.
        self._kept[name] = last.clone() if last.untyped_storage().nbytes() > last.nbytes else last
