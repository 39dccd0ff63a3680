"""What is measured: sizes, shapes, peers. Free of torch, for quick help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

OURS = "ours"
FLA = "fla"
PEERS = (FLA,)


class Size(NamedTuple):
    """Width of the hidden states, heads, width of a head."""

    hidden: int
    heads: int
    head_dim: int


SIZES = {"110m": Size(768, 12, 64), "1p3b": Size(2048, 16, 128)}
"""The study's models, as the presets of `examples/` have them."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One problem: hidden states of `batch` sequences of `length` tokens.

    Attributes:
        size_name: as in --shapes: 110m, or 110m/2 for two of its heads.
        size: widths and heads.
        length: tokens a sequence.
        batch: sequences.
    """

    size_name: str
    size: Size
    length: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.batch * self.length

    @property
    def length_name(self) -> str:
        """Length and batch, as in --shapes: 2048x16."""
        return f"{self.length}x{self.batch}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that a run is asked for.

    Attributes:
        mixers: ours, by name.
        shapes: problems, in the order of the table.
        peers: whose layers stand beside ours.
        repeat: timed runs of each case.
        seed: of weights and hidden states.
        output: folder of the report.
        configurations: that a Triton kernel tunes itself over, at most; None: all it has.
    """

    mixers: tuple[str, ...]
    shapes: tuple[LayerShape, ...]
    peers: tuple[str, ...]
    repeat: int
    seed: int
    output: Path
    configurations: int | None = None
