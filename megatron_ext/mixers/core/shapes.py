"""Shapes of states and numbers of exchange rounds that mixers report."""

from __future__ import annotations

from typing import NamedTuple


class StateShape(NamedTuple):
    """Shape of the recurrent states of a head group.

    Attributes:
        states: number of states.
        key_dim: number of rows of each state.
        value_dim: number of columns of each state, which is the width of the values that are written to the state.
    """

    states: int
    key_dim: int
    value_dim: int


class Rounds(NamedTuple):
    """Numbers of rounds in which a rank exchanges its features for whole sequences; see `Mixer.exchange_rounds`.

    Attributes:
        samples: number of rounds into which the samples are divided.
        head_groups: number of rounds into which the head groups of each round of samples are divided.
    """

    samples: int
    head_groups: int
