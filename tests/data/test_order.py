import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.data.order import sample_position, sample_positions

MASK = (1 << 64) - 1
GOLDEN_SMALL = [8, 5, 4, 2, 9, 6, 3, 0, 1, 7, 7, 2]
GOLDEN_LARGE = [443912, 953858, 92099, 219733, 498581, 128625]
GOLDEN_HUGE = 4498653919


def mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def by_hand(seed: int, index: int, num_samples: int) -> int:
    """Reference implementation with Python's unbounded integers, one sample at a time."""
    half = max(4, -(-(num_samples - 1).bit_length() // 2))
    epoch, value = divmod(index, num_samples)
    key = mix((mix(seed & MASK) + epoch) & MASK)
    while True:
        left, right = value >> half, value & ((1 << half) - 1)
        for number in range(6):
            left, right = right, left ^ (mix(right ^ mix((key + number) & MASK)) & ((1 << half) - 1))
        value = (left << half) | right
        if value < num_samples:
            return value


def epoch(seed: int, number: int, num_samples: int) -> np.ndarray:
    return sample_positions(seed, np.arange(number * num_samples, (number + 1) * num_samples), num_samples)


@pytest.mark.parametrize("num_samples", [1, 2, 3, 10, 255, 256, 257, 1000, 4097, 100_003])
def test_epoch_reads_every_window_once(num_samples):
    for number in (0, 1, 7):
        assert np.array_equal(np.sort(epoch(5, number, num_samples)), np.arange(num_samples))


def test_orders_of_epochs_and_seeds_differ():
    orders = [epoch(seed, number, 1000) for seed in (0, 1, 1234) for number in range(4)]
    for i, one in enumerate(orders):
        assert not np.array_equal(one, np.arange(1000))
        for other in orders[:i]:
            assert np.count_nonzero(one == other) < 15  # one match is expected by chance


def test_positions_are_uniform():
    """The window of a sample is uniform over seeds, and neighbouring samples are uncorrelated."""
    firsts = np.array([sample_position(seed, 0, 64) for seed in range(3200)])
    expected = 50
    chi_squared = ((np.bincount(firsts, minlength=64) - expected) ** 2 / expected).sum()
    assert chi_squared < 63 + 5 * (2 * 63) ** 0.5
    order = epoch(3, 0, 20_000).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / 20_000**0.5
    assert abs(np.corrcoef(np.arange(20_000), order)[0, 1]) < 5 / 20_000**0.5


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(1, 2**36))
def test_equals_the_definition(seed, index, num_samples):
    assert sample_position(seed, index, num_samples) == by_hand(seed, index, num_samples)


def test_order_golden_values():
    """Golden values: a change would silently reorder the data of every resumed run."""
    assert sample_positions(1234, np.arange(12), 10).tolist() == GOLDEN_SMALL
    far = np.array([0, 1, 2, 999_999, 1_000_000, 123_456_789])
    assert sample_positions(0, far, 1_000_000).tolist() == GOLDEN_LARGE
    assert sample_position(2**62, 10**12, 2**33 + 1) == GOLDEN_HUGE


@pytest.mark.parametrize(("index", "num_samples"), [(-1, 5), (0, 0)])
def test_invalid_sample_index(index, num_samples):
    with pytest.raises(ValueError, match="samples, smallest index"):
        sample_position(0, index, num_samples)
