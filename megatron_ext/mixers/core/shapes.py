"""Shapes of states and numbers of exchange rounds that mixers report."""

from __future__ import annotations

from typing import NamedTuple


class StateShape(NamedTuple):
    """Shape of the recurrent states of a head group.

    Attributes:
        states: number of states.
        key_dim: rows of each state.
        value_dim: columns of each state: the width of the values that are written to it.
    """

    states: int
    key_dim: int
    value_dim: int


class Rounds(NamedTuple):
    """Number of parts in which a rank exchanges its features for whole sequences; see `Mixer.exchange_rounds`.

    Attributes:
        samples: number of parts that the samples are split into.
        head_groups: number of parts that the head groups of each of those are split into.
    """

    samples: int
    head_groups: int
