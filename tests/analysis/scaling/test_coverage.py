"""Coverage of the laws' confidence intervals: a small part of what `tools/measure_coverage.py` measures."""

from __future__ import annotations

import coverage_of_laws
import pytest
from covering import cases


@pytest.mark.parametrize(
    ("points", "noise"),
    cases(every=[(6, 0.01), (9, 0.001), (16, 0.01)], default=[(6, 0.01), (9, 0.001)]),
)
def test_intervals_of_laws(points: int, noise: float) -> None:
    """Forty experiments. With six points, a bootstrap's intervals covered the truth in only 0.72 to 0.80 of them."""
    for name, coverage in coverage_of_laws.law_coverage(points, noise, 40).items():
        assert 0.85 <= coverage <= 1.0, name


def test_intervals_of_minima() -> None:
    coverage = coverage_of_laws.isoflop_coverage(7, 0.001, 40)
    assert 0.9 <= coverage["minimum"] <= 0.99
    assert coverage["exponent"] >= 0.85


def test_the_f_test_finds_as_many_false_differences_as_it_says() -> None:
    coverage = coverage_of_laws.transfer_coverage((4, 12), (0.01, 0.01), 0.0, 1000)
    for name, share in coverage.items():
        assert 0.93 <= share <= 0.97, name
