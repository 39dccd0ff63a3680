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

_MIN_READ_SECONDS = 0.01
"""Minimum seconds per step of waiting for samples for a rank to count as slow."""


@dataclass(frozen=True)
class RankSpeed:
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
        self._steps, self._read_seconds = 0, 0.0

    def after_step(self, step: int, read_seconds: float) -> None:
        """Count a step, and compare the ranks if a comparison is due. All ranks must call this method.

        Args:
            step: number of the completed step.
            read_seconds: seconds in which this rank waited for its samples.
        """
        self._steps, self._read_seconds = self._steps + 1, self._read_seconds + read_seconds
        if not self._config.straggler_every or step % self._config.straggler_every:
            return
        product = self._platform.product_seconds(self._dtype)
        speed = RankSpeed(self._rank, socket.gethostname(), product, self._read_seconds / self._steps)
        speeds = [RankSpeed(**fields) for fields in gather_objects(asdict(speed))]
        self._steps, self._read_seconds = 0, 0.0
        messages = describe_slow_ranks(speeds, self._config.straggler_factor)
        if self._records is not None:
            record = {"step": step, "slow": messages, "ranks": [asdict(speed) for speed in speeds]}
            self._records.append_record(STRAGGLERS, record)
            for line in messages:
                self._records.print_line(f"selectron: warning: step {step}: {line}")


def describe_slow_ranks(speeds: Sequence[RankSpeed], factor: float) -> list[str]:
    """Return a message for each rank that is slower than the others by `factor` in either measure.

    Each rank is compared with the median of the other ranks. The median over all ranks would include the rank's own
    time. With two ranks, no rank could then be twice as slow as the median.
    """
    lines = []
    for field, name, minimum in (
        ("product", "a matrix product", 0.0),
        ("reading", "reading a step's samples", _MIN_READ_SECONDS),
    ):
        times = [getattr(speed, field) for speed in speeds]
        for index, (speed, seconds) in enumerate(zip(speeds, times, strict=True)):
            others = times[:index] + times[index + 1 :]
            if others and seconds > factor * (typical := median(others)) and seconds > minimum:
                took = f"{1e3 * seconds:.3g} ms for {name}, the others {1e3 * typical:.3g}"
                lines.append(f"rank {speed.rank} on {speed.host} is slow: it took {took}")
    return lines
