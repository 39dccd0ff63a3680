"""Access to the positions before a mixer's input: none, shards of other ranks, or the decode cache (`memory`)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.parallel.exchange import gather_sequence
from megatron_ext.parallel.states import DiagonalScan, Scan, context_parallel_scan, diagonal_state_before, previous_rows


class SequenceHistory(ABC):
    """Interface through which a mixer accesses earlier positions.

    A mixer that accesses them only through `MixInput.history` works on a whole sequence, on a context-parallel shard
    and token by token. Each access of a layer has its own name, which is used once per call of `mix`.
    """

    @property
    def ranks(self) -> ProcessGroup | None:
        """Context-parallel group, for a mixer with its own exchange; None if the whole sequence is on this rank."""
        return None

    @abstractmethod
    def previous_rows(self, name: str, x: Tensor, count: int) -> Tensor:
        """Return the last rows before x, [count, ...]. Rows before the start of the sequence are zeros.

        Args:
            name: name of these rows, unique within the layer.
            x: current rows, [t, ...].
            count: number of rows to return.
        """

    @abstractmethod
    def prefix_rows(self, name: str, x_tbnw: Tensor, window: int | None = None) -> Tensor:
        """Return the rows of the sequence up to the last current row, [s, b, n, w], s >= t.

        Args:
            name: name of these rows, unique within the layer.
            x_tbnw: current rows, [t, b, n, w].
            window: number of rows that a position uses, including its own row. Older rows may be left out. None: all
                rows.
        """

    @abstractmethod
    def scan(self, name: str, scan: Scan, v_bthe: Tensor, key_dim: int) -> Tensor:
        """Run a scan from the state that earlier positions have left.

        Args:
            name: name of the state, unique within the layer.
            scan: scan over the current rows with their keys; jointly linear in values and state.
            v_bthe: values [b, t, h, e].
            key_dim: d of the state [b, h, d, e].

        Returns:
            Outputs of the scan.
        """

    @abstractmethod
    def scan_diagonal(self, name: str, scan: DiagonalScan, decay: Tensor) -> Tensor:
        """Run a scan whose state is updated elementwise, from the state that earlier positions have left.

        Args:
            name: name of the state, unique within the layer.
            scan: scan over the current rows; affine in the state.
            decay: factor by which the scan multiplies each element of the initial state, of the state's shape.

        Returns:
            Outputs of the scan.
        """


class EmptyHistory(SequenceHistory):
    """History without earlier positions: the sequence begins with the current rows."""

    def previous_rows(self, name: str, x: Tensor, count: int) -> Tensor:
        """Implement `SequenceHistory.previous_rows`."""
        return x.new_zeros(count, *x.shape[1:])

    def prefix_rows(self, name: str, x_tbnw: Tensor, window: int | None = None) -> Tensor:
        """Implement `SequenceHistory.prefix_rows`."""
        return x_tbnw

    def scan(self, name: str, scan: Scan, v_bthe: Tensor, key_dim: int) -> Tensor:
        """Implement `SequenceHistory.scan`."""
        return scan(v_bthe, None)[0]

    def scan_diagonal(self, name: str, scan: DiagonalScan, decay: Tensor) -> Tensor:
        """Implement `SequenceHistory.scan_diagonal`."""
        return scan(None)[0]


EMPTY_HISTORY = EmptyHistory()


class ContextParallelHistory(SequenceHistory):
    """History of a context-parallel rank: the sequence shards of lower ranks.

    Args:
        group: context-parallel group; rank r has shard r, and all shards have the same length.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    @property
    def ranks(self) -> ProcessGroup:
        """Implement `SequenceHistory.ranks`."""
        return self._group

    def previous_rows(self, name: str, x: Tensor, count: int) -> Tensor:
        """Implement `SequenceHistory.previous_rows`."""
        return previous_rows(x, count, self._group)

    def prefix_rows(self, name: str, x_tbnw: Tensor, window: int | None = None) -> Tensor:
        """Implement `SequenceHistory.prefix_rows`."""
        return gather_sequence(x_tbnw, self._group)[: (self._group.rank() + 1) * len(x_tbnw)]

    def scan(self, name: str, scan: Scan, v_bthe: Tensor, key_dim: int) -> Tensor:
        """Implement `SequenceHistory.scan`."""
        return context_parallel_scan(scan, v_bthe, key_dim, self._group)

    def scan_diagonal(self, name: str, scan: DiagonalScan, decay: Tensor) -> Tensor:
        """Implement `SequenceHistory.scan_diagonal`."""
        _, written = scan(None)
        return scan(diagonal_state_before(decay, written, self._group))[0]
