"""What lies before the rows that a mixer is given: nothing, the parts of other ranks, or what was seen (`memory`)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.parallel.exchange import gather_sequence
from megatron_ext.parallel.states import DiagonalWalk, Walk, diagonal_state_before, rows_before, walk_by_parts


class Past(ABC):
    """What a mixer asks for all that it needs of earlier positions.

    A mixer that looks back through its `Part.past` alone works on a whole sequence, on a context-parallel rank's part
    of it and token by token. A name tells apart the things that a layer asks for, each of them once a call.
    """

    @property
    def ranks(self) -> ProcessGroup | None:
        """Ranks that hold the sequence in parts, for a mixer with an exchange of its own; None: it is all here."""
        return None

    @abstractmethod
    def rows_before(self, name: str, x: Tensor, count: int) -> Tensor:
        """The last rows before x, with zeros before the sequence: [count, ...].

        Args:
            name: of these rows in the layer.
            x: the rows given, [t, ...].
            count: how many.
        """

    @abstractmethod
    def rows_so_far(self, name: str, x_tbnw: Tensor, window: int | None = None) -> Tensor:
        """The rows of the sequence up to the last one given: [s, b, n, w], s >= t.

        Args:
            name: of these rows in the layer.
            x_tbnw: the rows given, [t, b, n, w].
            window: rows that a position can see, its own included: those further back may be missing. None: all.
        """

    @abstractmethod
    def walk(self, name: str, walk: Walk, v_bthe: Tensor, key_dim: int) -> Tensor:
        """What a walk gives from the state before it.

        Args:
            name: of the state in the layer.
            walk: over the rows given, an op with keys of its own; linear in values and state together.
            v_bthe: its values [b, t, h, e].
            key_dim: d of the state [b, h, d, e].

        Returns:
            The walk's outputs.
        """

    @abstractmethod
    def walk_diagonal(self, name: str, walk: DiagonalWalk, kept: Tensor) -> Tensor:
        """As `walk`, where each number of the state goes by itself.

        Args:
            name: of the state in the layer.
            walk: over the rows given; affine in the state.
            kept: how much of each number of the state the walk keeps, of the state's shape.
        """


class Beginning(Past):
    """Nothing: the sequence begins with the rows given."""

    def rows_before(self, name: str, x: Tensor, count: int) -> Tensor:
        """See `Past.rows_before`."""
        return x.new_zeros(count, *x.shape[1:])

    def rows_so_far(self, name: str, x_tbnw: Tensor, window: int | None = None) -> Tensor:
        """See `Past.rows_so_far`."""
        return x_tbnw

    def walk(self, name: str, walk: Walk, v_bthe: Tensor, key_dim: int) -> Tensor:
        """See `Past.walk`."""
        return walk(v_bthe, None)[0]

    def walk_diagonal(self, name: str, walk: DiagonalWalk, kept: Tensor) -> Tensor:
        """See `Past.walk_diagonal`."""
        return walk(None)[0]


BEGINNING = Beginning()


class OtherRanks(Past):
    """The parts of the context-parallel ranks before this one.

    Args:
        group: rank r holds part r; the parts are of one length.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    @property
    def ranks(self) -> ProcessGroup:
        """See `Past.ranks`."""
        return self._group

    def rows_before(self, name: str, x: Tensor, count: int) -> Tensor:
        """See `Past.rows_before`."""
        return rows_before(x, count, self._group)

    def rows_so_far(self, name: str, x_tbnw: Tensor, window: int | None = None) -> Tensor:
        """See `Past.rows_so_far`."""
        return gather_sequence(x_tbnw, self._group)[: (self._group.rank() + 1) * len(x_tbnw)]

    def walk(self, name: str, walk: Walk, v_bthe: Tensor, key_dim: int) -> Tensor:
        """See `Past.walk`."""
        return walk_by_parts(walk, v_bthe, key_dim, self._group)

    def walk_diagonal(self, name: str, walk: DiagonalWalk, kept: Tensor) -> Tensor:
        """See `Past.walk_diagonal`."""
        _, written = walk(None)
        return walk(diagonal_state_before(kept, written, self._group))[0]
