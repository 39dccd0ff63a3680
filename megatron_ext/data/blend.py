"""Weighted choice of the domain of each sample, by a fixed and therefore stateless cycle.

The cycle follows Tijdeman's rule (The chairman assignment problem, Discrete Mathematics 32, 1980). Among the domains
that are far enough behind their share, the rule chooses the domain with the earliest deadline for its next sample.
After any n samples, the count of each of the k domains is within 1 - 1 / (2k - 2) samples of n times its share. No
other rule has a smaller bound. A whole cycle gives each domain exactly its share. The cycle then repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np
import numpy.typing as npt

MAX_CYCLE_LENGTH = 100_000
"""Maximum cycle length in samples. Shares with a larger common denominator are rounded to multiples of 1 / 100,000."""


class Blend:
    """Assignment of samples to domains. Sample i is sample `locate(i)[1]` of domain `locate(i)[0]`.

    Args:
        weights: weights of the domains in any unit, at least 0 each and not all 0.

    Attributes:
        shares: samples of each domain per cycle.

    Raises:
        ValueError: a weight is negative or not finite, all are 0, or a positive weight is too small for one sample per
            cycle.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = shares(weights)
        self._cycle = _cycle(self.shares)
        self._prior_counts = _prior_counts(self._cycle, len(self.shares))

    def locate(self, index: int) -> tuple[int, int]:
        """Return (domain index, index within the domain) of sample `index` >= 0, which is unbounded."""
        cycles, within = divmod(index, len(self._cycle))
        domain = int(self._cycle[within])
        return domain, cycles * self.shares[domain] + int(self._prior_counts[within])


def shares(weights: Sequence[float]) -> list[int]:
    """Convert weights to integer numbers of samples per cycle, for the shortest cycle that represents the weights.

    Raises:
        ValueError: see `Blend`.
    """
    if any(not 0 <= weight < float("inf") for weight in weights) or not sum(weights) > 0:
        raise ValueError(f"weights {list(weights)}")
    exact = [Fraction(repr(float(weight))) for weight in weights]  # exact: 0.1 is 1/10, not its double
    fractions = [weight / sum(exact) for weight in exact]
    length = min(lcm(*(fraction.denominator for fraction in fractions)), MAX_CYCLE_LENGTH)
    counts = [int(fraction * length) for fraction in fractions]
    remainders = sorted(range(len(fractions)), key=lambda index: (counts[index] - fractions[index] * length, index))
    for index in remainders[: length - sum(counts)]:
        counts[index] += 1
    for weight, share in zip(weights, counts, strict=True):
        if weight > 0 and share == 0:
            raise ValueError(f"weight {weight} is less than 1/{MAX_CYCLE_LENGTH} of the whole")
    return counts


def _cycle(samples: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the domain index of each sample of a cycle: int32 [sum of samples]."""
    length, active = sum(samples), [index for index, share in enumerate(samples) if share]
    slack = max(1, 2 * len(active) - 2)  # integer arithmetic: values below are scaled by length * slack
    num_assigned = [0] * len(samples)
    cycle = np.empty(length, dtype=np.int32)
    for position in range(length):
        deadlines = []
        for index in active:
            deficit = ((position + 1) * samples[index] - num_assigned[index] * length) * slack
            if deficit >= length:
                deadlines.append(((slack * length - length - deficit) / samples[index], index))
        domain = min(deadlines)[1]
        cycle[position] = domain
        num_assigned[domain] += 1
    return cycle


def _prior_counts(cycle: npt.NDArray[np.int32], domains: int) -> npt.NDArray[np.int32]:
    """Return, for each sample of the cycle, the number of earlier samples of its domain: int32 [cycle length]."""
    counts = np.empty_like(cycle)
    for domain in range(domains):
        positions = np.flatnonzero(cycle == domain)
        counts[positions] = np.arange(len(positions))
    return counts
