"""Which domain a run reads its sample i from, where domains have weights: a fixed cycle, so there is no state to keep.

The cycle is Tijdeman's (The chairman assignment problem, Discrete Mathematics 32, 1980): among the domains that are
owed enough, the one whose next sample falls due first. After any number n of samples, every domain has had n times its
share to within 1 - 1 / (2k - 2), k domains, which no other rule betters; so after a whole cycle it has exactly its
share, and the cycle begins again.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np
import numpy.typing as npt

LONGEST_CYCLE = 100_000
"""Shares that have a larger denominator are rounded to this one: they are kept to five decimals."""


class Blend:
    """Sample i is of domain `place(i)[0]`, and that domain's sample number `place(i)[1]`.

    Args:
        weights: of the domains, not negative, not all 0; in any unit.

    Attributes:
        shares: samples of each domain in a cycle.

    Raises:
        ValueError: a weight is negative or not finite, all are 0, or one that is above 0 is so small a part of the
            whole that a cycle has no sample of it.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = shares(weights)
        self._cycle = _cycle(self.shares)
        self._before = _before(self._cycle, len(self.shares))

    def place(self, index: int) -> tuple[int, int]:
        """(domain, which of its samples) of sample `index`, from 0 without end."""
        cycles, within = divmod(index, len(self._cycle))
        domain = int(self._cycle[within])
        return domain, cycles * self.shares[domain] + int(self._before[within])


def shares(weights: Sequence[float]) -> list[int]:
    """Weights as whole numbers of samples in the shortest cycle that has room for them; see `Blend`."""
    if any(not 0 <= weight < float("inf") for weight in weights) or not sum(weights) > 0:
        raise ValueError(f"weights {list(weights)}")
    exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.1 is meant as a tenth, not as its double
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
    """The domain of each sample of a cycle: int32 [sum of samples]."""
    length, chosen = sum(samples), [number for number, share in enumerate(samples) if share]
    slack = max(1, 2 * len(chosen) - 2)  # in whole numbers: everything below is times length * slack
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
    """How many samples of its own domain come before each in the cycle: int32, as long as the cycle."""
    before = np.empty_like(cycle)
    for domain in range(domains):
        places = np.flatnonzero(cycle == domain)
        before[places] = np.arange(len(places))
    return before
