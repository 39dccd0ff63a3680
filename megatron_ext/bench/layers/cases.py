"""Sizes, shapes and peers of the layer benchmark. Imports no torch, so that help is fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

OURS = "ours"
FLA = "fla"
PEERS = (FLA,)


class Size(NamedTuple):
    """hidden_size, number of heads, width of a head."""

    hidden: int
    heads: int
    head_dim: int


SIZES = {"110m": Size(768, 12, 64), "1p3b": Size(2048, 16, 128)}
"""Model sizes of the study, as in the presets of `examples/`."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Problem shape: hidden states of `batch` sequences of `length` tokens.

    Attributes:
        size_name: as in --shapes: 110m, or 110m/2 for two of its heads.
        size: widths and number of heads.
        length: tokens per sequence.
        batch: number of sequences.
    """

    size_name: str
    size: Size
    length: int
    batch: int

    @property
    def tokens(self) -> int:
        """Total number of tokens."""
        return self.batch * self.length

    @property
    def length_name(self) -> str:
        """Length and batch as in --shapes: 2048x16."""
        return f"{self.length}x{self.batch}"


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Settings of a benchmark run.

    Attributes:
        mixers: names of our mixers.
        shapes: problems, in the order of the table.
        peers: libraries whose layers are compared with ours.
        repeat: timed repetitions of each case.
        seed: of weights and hidden states.
        output: folder of the report.
        configurations: maximum number over which a Triton kernel autotunes; None: all.
    """

    mixers: tuple[str, ...]
    shapes: tuple[LayerShape, ...]
    peers: tuple[str, ...]
    repeat: int
    seed: int
    output: Path
    configurations: int | None = None
