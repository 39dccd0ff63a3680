"""Shapes, names of ops and peers, and the error of a refused option. Imports no torch, so that help is fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Pass = Literal["forward", "forward_backward"]
ChoiceDistribution = Literal["even", "same", "zipf"]

PASSES: tuple[Pass, ...] = ("forward", "forward_backward")
CHOICE_DISTRIBUTIONS: tuple[ChoiceDistribution, ...] = ("even", "same", "zipf")
OPS = (
    "top1_chunk:approx",
    "top1_chunk:exact",
    "top1_chunk:exact_lse",
    "top1_element:straight_through",
    "top1_element:selected",
)
ALIASES = {"top1_chunk": "top1_chunk:exact", "top1_element": "top1_element:straight_through"}
BASELINE = "sdpa_cudnn"
PEERS = (BASELINE, "sdpa_flash", "flex_window", "nsa")


class OptionError(ValueError):
    """An option, or the machine, does not allow the request.

    Args:
        where: the option.
        problem: the problem, including the value.
        hint: the fix.
    """

    def __init__(self, where: str, problem: str, hint: str) -> None:
        super().__init__(f"{where}: {problem}; {hint}")
        self.where = where
        self.problem = problem
        self.hint = hint


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One attention problem: q [batch, length, heads, head_dim], k and v with `groups` heads; bf16."""

    batch: int
    length: int
    heads: int
    groups: int
    head_dim: int

    @property
    def tokens(self) -> int:
        """Number of tokens in all rows of the batch."""
        return self.batch * self.length

    @property
    def length_name(self) -> str:
        """Return the name used in --lengths, for example 2048x50."""
        return f"{self.length}x{self.batch}"

    @property
    def heads_name(self) -> str:
        """Return the name used in --heads, for example 16x128, with the number of key heads if it differs."""
        name = f"{self.heads}x{self.head_dim}"
        return name if self.groups == self.heads else f"{name} ({self.groups} kv)"


@dataclass(frozen=True, kw_only=True)
class KernelPlan:
    """Settings of a run.

    Attributes:
        shapes: attention problems, in the order of the table.
        ops: names of our ops, from OPS.
        peers: names of other implementations, from PEERS.
        passes: passes to time.
        choices: distribution of the queries over chunks, see `inputs`.
        repeat: timed runs of each case.
        chunk_size: keys per chunk.
        top_k: chunks per query.
        seed: seed of the first inputs; each further set increments it.
        output: folder of the report.
    """

    shapes: tuple[Shape, ...]
    ops: tuple[str, ...]
    peers: tuple[str, ...]
    passes: tuple[Pass, ...]
    choices: ChoiceDistribution
    repeat: int
    chunk_size: int
    top_k: int
    seed: int
    output: Path
