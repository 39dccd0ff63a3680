"""Windows of one range of the token stream, and the order in which a run reads them."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable
from itertools import count

from megatron_ext.data.order import sample_position

MAX_LOST_FRACTION = 0.5
"""Maximum fraction of a range's windows that may be lost. The remaining windows would not represent the range."""


class Windows:
    """Windows of T + 1 tokens with a stride of T, each once per epoch, in an order that depends only on (seed, index).

    A sample whose window is lost reads another window, which then occurs more than once in that epoch. All other
    samples stay the same. A run that resumes without a shard therefore keeps its order.

    Args:
        start: offset in the stream of the range's first token.
        num_tokens: length of the range in tokens.
        seq_length: T.
        seed: seed of the order.
        lost: (offset in the stream of the first token, number of tokens) of each range that cannot be read.

    Attributes:
        total: number of windows, including lost windows. Tokens at the end that do not fill a window are dropped.
        lost: number of lost windows.
    """

    def __init__(
        self, start: int, num_tokens: int, seq_length: int, seed: int, lost: Iterable[tuple[int, int]] = ()
    ) -> None:
        self._start, self._seq_length, self._seed = start, seq_length, seed
        self.total = max(0, (num_tokens - 1) // seq_length)
        self._lost_intervals = self._find_lost_intervals(lost)
        self.lost = sum(end - begin for begin, end in self._lost_intervals)

    @property
    def has_lost_too_many(self) -> bool:
        """True if more than `MAX_LOST_FRACTION` of the windows are lost."""
        return self.lost > MAX_LOST_FRACTION * self.total

    def token_offset(self, index: int) -> int:
        """Return the offset in the stream of the first token of sample `index` >= 0. The index may exceed an epoch."""
        window = sample_position(self._seed, index, self.total)
        for attempt in count(1):
            if not self._is_lost(window):
                break
            window = sample_position(derived_seed(self._seed, f"instead {attempt}"), index, self.total)
        return self._start + window * self._seq_length

    def _is_lost(self, window: int) -> bool:
        interval = bisect_right(self._lost_intervals, (window, self.total)) - 1
        return interval >= 0 and window < self._lost_intervals[interval][1]

    def _find_lost_intervals(self, lost: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return disjoint, sorted intervals [begin, end) of the windows that contain a lost token."""
        intervals: list[tuple[int, int]] = []
        for first, length in sorted(lost):
            from_start = first - self._start
            begin = max(0, -((self._seq_length - from_start) // self._seq_length))
            end = min(self.total, (from_start + length - 1) // self._seq_length + 1)
            if intervals:
                begin = max(begin, intervals[-1][1])
            if length > 0 and begin < end:
                intervals.append((begin, end))
        return intervals


def derived_seed(seed: int, name: str) -> int:
    """Return a seed that differs for each name, such as a domain."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
