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

LONGEST_CYCLE = 100_000
"""Maximum cycle length in samples. Shares with a larger common denominator are rounded to multiples of 1 / 100,000."""


class Blend:
    """Assignment of samples to domains. Sample i is sample `place(i)[1]` of domain `place(i)[0]`.

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
        self._before = _before(self._cycle, len(self.shares))

    def place(self, index: int) -> tuple[int, int]:
        """Return (domain index, index within the domain) of sample `index` >= 0, which is unbounded."""
        cycles, within = divmod(index, len(self._cycle))
        domain = int(self._cycle[within])
        return domain, cycles * self.shares[domain] + int(self._before[within])


def shares(weights: Sequence[float]) -> list[int]:
    """Convert weights to integer numbers of samples per cycle, for the shortest cycle that represents the weights.

    Raises:
        ValueError: see `Blend`.
    """
    if any(not 0 <= weight < float("inf") for weight in weights) or not sum(weights) > 0:
        raise ValueError(f"weights {list(weights)}")
    exact = [Fraction(repr(float(weight))) for weight in weights]  # exact: 0.1 is 1/10, not its double
    parts = [weight / sum(exact) for weight in exact]
    length = min(lcm(*(part.denominator for part in parts)), LONGEST_CYCLE)
    found = [int(part * length) for part in parts]
    remainders = sorted(range(len(parts)), key=lambda number: (found[number] - parts[number] * length, number))
    for number in remainders[: length - sum(found)]:
        found[number] += 1
    for weight, share in zip(weights, found, strict=True):
        if weight > 0 and share == 0:
            raise ValueError(f"weight {weight} is less than 1/{LONGEST_CYCLE} of the whole")
    return found


def _cycle(samples: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the domain index of each sample of a cycle: int32 [sum of samples]."""
    length, chosen = sum(samples), [number for number, share in enumerate(samples) if share]
    slack = max(1, 2 * len(chosen) - 2)  # integer arithmetic: values below are scaled by length * slack
    given = [0] * len(samples)
    cycle = np.empty(length, dtype=np.int32)
    for place in range(length):
        due = []
        for number in chosen:
            owed = ((place + 1) * samples[number] - given[number] * length) * slack
            if owed >= length:
                due.append(((slack * length - length - owed) / samples[number], number))
        domain = min(due)[1]
        cycle[place] = domain
        given[domain] += 1
    return cycle


def _before(cycle: npt.NDArray[np.int32], domains: int) -> npt.NDArray[np.int32]:
    """Return, for each sample of the cycle, the number of earlier samples of its domain: int32 [cycle length]."""
    before = np.empty_like(cycle)
    for domain in range(domains):
        places = np.flatnonzero(cycle == domain)
        before[places] = np.arange(len(places))
    return before
