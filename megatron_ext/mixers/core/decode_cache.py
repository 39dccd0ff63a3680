"""Decode caches, and the base class of modules that access earlier positions of the sequence."""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.mixers.core.history import EMPTY_HISTORY, ContextParallelHistory, SequenceHistory
from megatron_ext.parallel.states import DiagonalScan, Scan


class DecodeCache(SequenceHistory):
    """Decode cache of one module in this process.

    The cache contains recurrent states, the last rows of convolutions, and keys and values. With a window, only the
    keys and values in the window are cached.

    Attributes:
        num_positions: number of positions processed so far.
    """

    def __init__(self) -> None:
        self.num_positions = 0
        self._last_rows: dict[str, Tensor] = {}  # rows [t, b, ...]
        self._states: dict[str, Tensor] = {}  # [b, ...]
        self._rows: dict[str, _RowBuffer] = {}

    @property
    def num_bytes(self) -> int:
        """Number of allocated bytes, including spare capacity."""
        tensors = [*self._last_rows.values(), *self._states.values(), *(rows.buffer for rows in self._rows.values())]
        return sum(x.untyped_storage().nbytes() for x in tensors)

    def advance(self, count: int) -> int:
        """Advance by `count` positions and return the position of the first of these."""
        assert self._last_rows or self._states or self._rows or not self.num_positions, (
            "a mixer gets earlier positions from `MixInput.history`; this one does not"
        )
        self.num_positions += count
        return self.num_positions - count

    def previous_rows(self, name: str, x: Tensor, count: int) -> Tensor:
        """Implement `SequenceHistory.previous_rows`."""
        previous = self._last_rows.get(name)
        if previous is None:
            previous = x.new_zeros(count, *x.shape[1:])
        self._keep_last(name, torch.cat([previous, x]), count)
        return previous

    def prefix_rows(self, name: str, x_tbnw: Tensor, window: int | None = None) -> Tensor:
        """Implement `SequenceHistory.prefix_rows`."""
        if window is None:
            return self._rows.setdefault(name, _RowBuffer()).append(x_tbnw)
        rows = torch.cat([self._last_rows[name], x_tbnw]) if name in self._last_rows else x_tbnw
        self._keep_last(name, rows, window - 1)
        return rows

    def scan(self, name: str, scan: Scan, v_bthe: Tensor, key_dim: int) -> Tensor:
        """Implement `SequenceHistory.scan`."""
        out, self._states[name] = scan(v_bthe, self._states.get(name))
        return out

    def scan_diagonal(self, name: str, scan: DiagonalScan, decay: Tensor) -> Tensor:
        """Implement `SequenceHistory.scan_diagonal`."""
        out, self._states[name] = scan(self._states.get(name))
        return out

    def select_sequences(self, indices_n: Tensor) -> None:
        """Replace the cached sequences by those with the given indices, in this order. An index may be repeated.

        Args:
            indices_n: indices of sequences, int64 [n], on the device of the cache.
        """
        self._last_rows = {name: rows.index_select(1, indices_n) for name, rows in self._last_rows.items()}
        self._states = {name: state.index_select(0, indices_n) for name, state in self._states.items()}
        for rows in self._rows.values():
            rows.select_sequences(indices_n)

    def _keep_last(self, name: str, rows: Tensor, count: int) -> None:
        last = rows[max(len(rows) - count, 0) :]
        # A view would keep the memory of all rows and of the other features in the same projection.
        self._last_rows[name] = last.clone() if last.untyped_storage().nbytes() > last.nbytes else last


class _RowBuffer:
    """Growing row buffer with spare capacity, so that appending does not copy all rows each time."""

    def __init__(self) -> None:
        self._count, self.buffer = 0, torch.empty(0)

    def append(self, x: Tensor) -> Tensor:
        """Append x [t, ...] and return all rows so far, as a view that is valid until the next call."""
        start, self._count = self._count, self._count + len(x)
        if self._count > len(self.buffer):
            buffer = x.new_empty(max(self._count, 3 * start // 2), *x.shape[1:])
            if start:
                buffer[:start] = self.buffer[:start]
            self.buffer = buffer
        self.buffer[start : self._count] = x
        return self.buffer[: self._count]

    def select_sequences(self, indices_n: Tensor) -> None:
        """Reorder the sequences as `DecodeCache.select_sequences` does."""
        buffer = self.buffer.new_empty(len(self.buffer), len(indices_n), *self.buffer.shape[2:])
        torch.index_select(self.buffer[: self._count], 1, indices_n, out=buffer[: self._count])
        self.buffer = buffer


class HistoryModule(MegatronModule):
    """Base class of modules that access earlier positions of the sequence.

    Args:
        config: Megatron's configuration of the model.
        sequence_group: ranks that have the shards of the sequence, in order.

    Attributes:
        decode_cache: decode cache; None outside decoding. See `evaluation.decoding`.
    """

    def __init__(self, config: TransformerConfig, sequence_group: ProcessGroup) -> None:
        super().__init__(config)
        self._sharded_history = EMPTY_HISTORY if sequence_group.size() == 1 else ContextParallelHistory(sequence_group)
        self.decode_cache: DecodeCache | None = None

    @property
    def history(self) -> SequenceHistory:
        """Access to the positions before this rank's sequence shard: the decode cache, or the other ranks."""
        return self._sharded_history if self.decode_cache is None else self.decode_cache
