"""Modules that look back in the sequence, and what they remember of it while a model decodes token by token."""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.mixers.past import BEGINNING, OtherRanks, Past
from megatron_ext.parallel.states import DiagonalWalk, Walk


class Memory(Past):
    """What one module has seen so far, in this process.

    It keeps states, the last rows of convolutions, and keys and values: all of them, or those in a window.

    Attributes:
        num_positions: positions seen.
    """

    def __init__(self) -> None:
        self.num_positions = 0
        self._kept: dict[str, Tensor] = {}  # rows [t, b, ...]
        self._states: dict[str, Tensor] = {}  # [b, ...]
        self._rows: dict[str, _Rows] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held, room for more included."""
        held = [*self._kept.values(), *self._states.values(), *(rows.room for rows in self._rows.values())]
        return sum(x.untyped_storage().nbytes() for x in held)

    def advance(self, count: int) -> int:
        """Count positions that are given now. Returns the first of them."""
        assert self._kept or self._states or self._rows or not self.num_positions, (
            "a mixer asks `Part.past` for what came before; this one does not"
        )
        self.num_positions += count
        return self.num_positions - count

    def rows_before(self, name: str, x: Tensor, count: int) -> Tensor:
        """See `Past.rows_before`."""
        before = self._kept.get(name)
        if before is None:
            before = x.new_zeros(count, *x.shape[1:])
        self._keep_last(name, torch.cat([before, x]), count)
        return before

    def rows_so_far(self, name: str, x_tbnw: Tensor, window: int | None = None) -> Tensor:
        """See `Past.rows_so_far`."""
        if window is None:
            return self._rows.setdefault(name, _Rows()).extended_by(x_tbnw)
        rows = torch.cat([self._kept[name], x_tbnw]) if name in self._kept else x_tbnw
        self._keep_last(name, rows, window - 1)
        return rows

    def walk(self, name: str, walk: Walk, v_bthe: Tensor, key_dim: int) -> Tensor:
        """See `Past.walk`."""
        out, self._states[name] = walk(v_bthe, self._states.get(name))
        return out

    def walk_diagonal(self, name: str, walk: DiagonalWalk, kept: Tensor) -> Tensor:
        """See `Past.walk_diagonal`."""
        out, self._states[name] = walk(self._states.get(name))
        return out

    def take(self, numbers_n: Tensor) -> None:
        """Go on with some of the sequences, each as often as it is named.

        Args:
            numbers_n: int64, of the sequences, on the device of what is remembered.
        """
        self._kept = {name: rows.index_select(1, numbers_n) for name, rows in self._kept.items()}
        self._states = {name: state.index_select(0, numbers_n) for name, state in self._states.items()}
        for rows in self._rows.values():
            rows.take(numbers_n)

    def _keep_last(self, name: str, rows: Tensor, count: int) -> None:
        last = rows[max(len(rows) - count, 0) :]
        # A view would hold all rows in memory, and what else the layer has projected beside them.
        self._kept[name] = last.clone() if last.untyped_storage().nbytes() > last.nbytes else last


class _Rows:
    """Rows that are all kept, in room for more, so that not all of them are copied for each that comes."""

    def __init__(self) -> None:
        self._count, self.room = 0, torch.empty(0)

    def extended_by(self, x: Tensor) -> Tensor:
        """All rows so far, x [t, ...] the last of them; a view until the next call."""
        start, self._count = self._count, self._count + len(x)
        if self._count > len(self.room):
            room = x.new_empty(max(self._count, 3 * start // 2), *x.shape[1:])
            if start:
                room[:start] = self.room[:start]
            self.room = room
        self.room[start : self._count] = x
        return self.room[: self._count]

    def take(self, numbers_n: Tensor) -> None:
        """See `Memory.take`."""
        room = self.room.new_empty(len(self.room), len(numbers_n), *self.room.shape[2:])
        torch.index_select(self.room[: self._count], 1, numbers_n, out=room[: self._count])
        self.room = room


class LooksBack(MegatronModule):
    """A module of a layer that needs something of earlier positions.

    Args:
        config: Megatron's configuration of the model.
        sequence_group: ranks that hold the parts of the sequence, in order.

    Attributes:
        memory: what the module has seen, while it decodes; see `evaluation.decoding`.
    """

    def __init__(self, config: TransformerConfig, sequence_group: ProcessGroup) -> None:
        super().__init__(config)
        self._others = BEGINNING if sequence_group.size() == 1 else OtherRanks(sequence_group)
        self.memory: Memory | None = None

    @property
    def past(self) -> Past:
        """What lies before this rank's part of the sequence."""
        return self._others if self.memory is None else self.memory
