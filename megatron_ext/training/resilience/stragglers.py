"""Detection of slow ranks. Each rank is timed separately, because within a step all ranks wait for the slowest."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from megatron_ext.config.schema import ResilienceConfig
from megatron_ext.parallel.agreement import gather_objects
from megatron_ext.platform.device import DTYPES, Platform
from megatron_ext.run_folder.layout import STRAGGLERS
from megatron_ext.training.records import RunRecords

_COUNTS = 0.01
"""Minimum seconds per step of waiting for samples for a rank to count as slow."""


@dataclass(frozen=True)
class Pace:
    """Speed of a rank.

    Attributes:
        rank: global rank.
        host: host name.
        product: seconds of a matrix product of a fixed size.
        reading: mean seconds per step in which the rank waited for its samples.
    """

    rank: int
    host: str
    product: float
    reading: float


class Stragglers:
    """Compare the speeds of the ranks at regular intervals.

    Args:
        config: interval and threshold.
        precision: precision of the run, which selects the dtype of the timed matrix product.
        platform: platform of this process.
        rank: global rank of this process.
        records: records of the run; None except on the first rank.
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
        """Count a step, and compare the ranks if a comparison is due. All ranks must call this method.

        Args:
            step: number of the completed step.
            reading: seconds in which this rank waited for its samples.
        """
        self._steps, self._reading = self._steps + 1, self._reading + reading
        if not self._config.straggler_every or step % self._config.straggler_every:
            return
        product = self._platform.product_seconds(self._dtype)
        pace = Pace(self._rank, socket.gethostname(), product, self._reading / self._steps)
        paces = [Pace(**one) for one in gather_objects(asdict(pace))]
        self._steps, self._reading = 0, 0.0
        slow = slow_ones(paces, self._config.straggler_factor)
        if self._records is not None:
            record = {"step": step, "slow": slow, "ranks": [asdict(pace) for pace in paces]}
            self._records.keep(STRAGGLERS, record)
            for line in slow:
                self._records.say(f"selectron: warning: step {step}: {line}")


def slow_ones(paces: Sequence[Pace], factor: float) -> list[str]:
    """Return a message for each rank that is slower than the others by `factor` in either measure.

    Each rank is compared with the median of the other ranks. The median over all ranks would include the rank's own
    time. With two ranks, no rank could then be twice as slow as the median.
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
