"""What is measured: shapes, names of ops and peers, and the form of a refused option. Free of torch, for quick help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Pass = Literal["forward", "forward_backward"]
Preference = Literal["even", "same", "zipf"]

PASSES: tuple[Pass, ...] = ("forward", "forward_backward")
PREFERENCES: tuple[Preference, ...] = ("even", "same", "zipf")
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
    """An option, or the machine, does not allow what is asked.

    Args:
        where: the option at fault.
        problem: what is wrong with it, naming the value.
        mend: what to do about it.
    """

    def __init__(self, where: str, problem: str, mend: str) -> None:
        super().__init__(f"{where}: {problem}; {mend}")
        self.where = where
        self.problem = problem
        self.mend = mend


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
        """Tokens in all rows of the batch."""
        return self.batch * self.length

    @property
    def length_name(self) -> str:
        """As in --lengths: 2048x50."""
        return f"{self.length}x{self.batch}"

    @property
    def heads_name(self) -> str:
        """As in --heads: 16x128; with the key heads where they are fewer."""
        name = f"{self.heads}x{self.head_dim}"
        return name if self.groups == self.heads else f"{name} ({self.groups} kv)"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that a run is asked for.

    Attributes:
        shapes: problems, in the order of the table.
        ops: ours, names of OPS.
        peers: theirs, names of PEERS.
        passes: what is timed.
        choices: how queries spread over chunks, see `inputs`.
        repeat: timed runs of each case.
        chunk_size: keys a chunk.
        top_k: chunks a query takes.
        seed: of the first inputs; each next set takes the next number.
        output: folder of the report.
    """

    shapes: tuple[Shape, ...]
    ops: tuple[str, ...]
    peers: tuple[str, ...]
    passes: tuple[Pass, ...]
    choices: Preference
    repeat: int
    chunk_size: int
    top_k: int
    seed: int
    output: Path
