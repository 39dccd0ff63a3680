"""Blend of weighted domains: counts at every point of a run, and the order compared with a sample-by-sample count."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.data.blend import Blend, shares

GOLDEN = [0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.6, 0.4], [3, 2]),
        ([3, 2], [3, 2]),
        ([1.0], [1]),
        ([0.0, 5.0], [0, 1]),
        ([0.1, 0.2, 0.7], [1, 2, 7]),
        ([52.2, 26.7, 5.2, 4.2, 4.6, 3.8, 3.3], [522, 267, 52, 42, 46, 38, 33]),
        ([1 / 3, 1 / 3, 1 / 3], [1, 1, 1]),
        ([2**0.5, 1.0], [58579, 41421]),  # 0.585786..., rounded to five decimals
    ],
)
def test_shares(weights, expected):
    assert shares(weights) == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any))
def test_counts_stay_within_one_of_the_weights(weights):
    blend, count = Blend(weights), Counter()
    for index in range(2 * sum(weights) + 5):
        domain, number = blend.locate(index)
        assert number == count[domain]  # the samples of a domain come in order, none twice
        count[domain] += 1
        for other, weight in enumerate(weights):
            assert abs(count[other] * sum(weights) - (index + 1) * weight) < sum(weights)


def test_rounded_weights():
    weights = [0.7123456789, 0.2, 0.087654321]
    blend, total = Blend(weights), sum(weights)
    domains = np.array([blend.locate(index)[0] for index in range(100_000)])
    for domain, weight in enumerate(weights):
        counts = np.cumsum(domains == domain)
        assert np.abs(counts - np.arange(1, len(domains) + 1) * weight / total).max() < 2


def test_distant_sample_without_earlier_ones():
    """Sample 10**15 is computed without the samples before it.

    The domain equals that of the sample a whole number of cycles earlier.
    """
    blend = Blend([0.6, 0.4])
    domain, number = blend.locate(10**15 + 3)
    assert (domain, number) == (blend.locate(3)[0], 2 * 10**14 * blend.shares[domain] + blend.locate(3)[1])


def test_blend_golden_values():
    """Golden values: the data position in a checkpoint depends on them."""
    assert [Blend([0.6, 0.4]).locate(index)[0] for index in range(12)] == GOLDEN


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [float("nan"), 1], [float("inf"), 1], [1, 1e-7]])
def test_invalid_weights(weights):
    with pytest.raises(ValueError, match="weight"):
        Blend(weights)
