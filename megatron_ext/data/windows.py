"""The windows of one stretch of the token stream, and the order in which a run reads them."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable
from itertools import count

from megatron_ext.data.order import sample_position

MOST_LOST = 0.5
"""Share of a stretch's windows that may be lost: of fewer than that, the run would no longer be what was asked for."""


class Windows:
    """Windows of T + 1 tokens, T apart, each once an epoch, in an order that is a pure function of (seed, index).

    What is lost changes nothing else: a sample whose window is lost reads another, which comes twice in that epoch;
    all other samples stay what they were. So a run that goes on without a shard keeps its order.

    Args:
        start: first token of the stretch in the stream.
        num_tokens: its length.
        seq_length: T.
        seed: of the order.
        lost: (first token, number of tokens) in the stream of what cannot be read.

    Attributes:
        total: how many windows there are, lost ones among them; the last tokens, too few for one, are in none.
        lost: how many are lost.
    """

    def __init__(
        self, start: int, num_tokens: int, seq_length: int, seed: int, lost: Iterable[tuple[int, int]] = ()
    ) -> None:
        self._start, self._seq_length, self._seed = start, seq_length, seed
        self.total = max(0, (num_tokens - 1) // seq_length)
        self._lost = self._lost_runs(lost)
        self.lost = sum(end - begin for begin, end in self._lost)

    @property
    def too_few(self) -> bool:
        """Whether so many are lost that those left cannot stand for all."""
        return self.lost > MOST_LOST * self.total

    def place(self, index: int) -> int:
        """First token, in the stream, of sample `index` of the stretch; without end."""
        window = sample_position(self._seed, index, self.total)
        for attempt in count(1):
            if not self._is_lost(window):
                break
            window = sample_position(derived_seed(self._seed, f"instead {attempt}"), index, self.total)
        return self._start + window * self._seq_length

    def _is_lost(self, window: int) -> bool:
        run = bisect_right(self._lost, (window, self.total)) - 1
        return run >= 0 and window < self._lost[run][1]

    def _lost_runs(self, lost: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Runs [begin, end) of windows that hold a token of what is lost: sorted, none over another."""
        runs: list[tuple[int, int]] = []
        for first, length in sorted(lost):
            from_start = first - self._start
            begin = max(0, -((self._seq_length - from_start) // self._seq_length))
            end = min(self.total, (from_start + length - 1) // self._seq_length + 1)
            if runs:
                begin = max(begin, runs[-1][1])
            if length > 0 and begin < end:
                runs.append((begin, end))
        return runs


def derived_seed(seed: int, name: str) -> int:
    """A seed for a part of a run, unlike those of all its other parts."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
