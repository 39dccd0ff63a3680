"""Which ranks are slower than the others: each is timed alone, as in a step all wait for the slowest."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from megatron_ext.config.schema import ResilienceConfig
from megatron_ext.parallel.agreement import from_every_rank
from megatron_ext.platform import DTYPES, Platform
from megatron_ext.training.records import RunRecords

STRAGGLERS = "stragglers.jsonl"
_COUNTS = 0.01
"""Seconds a step below which the reading of samples is nobody's trouble."""


@dataclass(frozen=True)
class Pace:
    """How quick a rank is.

    Attributes:
        rank: its number.
        host: its machine.
        product: seconds of a matrix product of a fixed size.
        reading: seconds a step in which it waited for its samples.
    """

    rank: int
    host: str
    product: float
    reading: float


class Stragglers:
    """Compares the ranks' paces.

    Args:
        config: how often, and what is slow.
        precision: of the run.
        platform: where this runs.
        rank: this process's.
        records: of the run; on the first rank only.
    """

    def __init__(
        self,
        config: ResilienceConfig,
        precision: str,
        platform: Platform,
        rank: int,
        records: RunRecords | None,
    ) -> None:
        self._config, self._dtype, self._platform, self._rank = config, DTYPES[precision], platform, rank
        self._records = records
        self._steps, self._reading = 0, 0.0

    def after_step(self, step: int, reading: float) -> None:
        """Count a step, and compare if it is time; a collective call.

        Args:
            step: that was done.
            reading: seconds in which this rank waited for its samples.
        """
        self._steps, self._reading = self._steps + 1, self._reading + reading
        if not self._config.straggler_every or step % self._config.straggler_every:
            return
        product = self._platform.product_seconds(self._dtype)
        pace = Pace(self._rank, socket.gethostname(), product, self._reading / self._steps)
        paces = [Pace(**one) for one in from_every_rank(asdict(pace))]
        self._steps, self._reading = 0, 0.0
        slow = slow_ones(paces, self._config.straggler_factor)
        if self._records is not None:
            record = {"step": step, "slow": slow, "ranks": [asdict(pace) for pace in paces]}
            self._records.keep(STRAGGLERS, record)
            for line in slow:
                self._records.say(f"selectron: warning: step {step}: {line}")


def slow_ones(paces: Sequence[Pace], factor: float) -> list[str]:
    """A line for each rank that is slower than the others by a factor, in either way.

    Each is compared with the median of the others. In one over all ranks its own time has a part: of two ranks none
    could ever take twice as long, and one that took 2.9 times as long as the other would not count as slow by half.
    """
    lines = []
    for what, name, least in (("product", "a matrix product", 0.0), ("reading", "reading a step's samples", _COUNTS)):
        times = [getattr(pace, what) for pace in paces]
        for number, (pace, seconds) in enumerate(zip(paces, times, strict=True)):
            others = times[:number] + times[number + 1 :]
            if others and seconds > factor * (usual := median(others)) and seconds > least:
                took = f"{1e3 * seconds:.3g} ms for {name}, the others {1e3 * usual:.3g}"
                lines.append(f"rank {pace.rank} on {pace.host} is slow: it took {took}")
    return lines
