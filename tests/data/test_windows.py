"""Windows of a range with lost tokens, compared with a reference that checks every token of every window."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.data.order import sample_position
from megatron_ext.data.windows import Windows, derived_seed

T, START, TOKENS = 7, 100, 500


def offsets(windows: Windows, epochs: int = 1) -> list[int]:
    return [windows.token_offset(index) for index in range(epochs * windows.total)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 40)), max_size=6))
def test_window_with_a_lost_token_is_lost(lost):
    windows = Windows(START, TOKENS, T, 3, lost)
    lost_tokens = {token for first, length in lost for token in range(first, first + length)}
    starts = [START + number * T for number in range((TOKENS - 1) // T)]
    broken = {start for start in starts if any(token in lost_tokens for token in range(start, start + T + 1))}
    assert (windows.total, windows.lost) == (len(starts), len(broken))
    assert windows.has_lost_too_many == (len(broken) > len(starts) / 2)
    if windows.has_lost_too_many:
        return
    whole = offsets(Windows(START, TOKENS, T, 3), epochs=2)
    for offset, before in zip(offsets(windows, epochs=2), whole, strict=True):
        assert offset not in broken
        assert offset == before or before in broken  # only samples of lost windows change


def test_each_window_once_per_epoch_in_the_sample_order():
    windows = Windows(START, TOKENS, T, 3)
    assert offsets(windows, 2) == [START + T * sample_position(3, index, 71) for index in range(2 * 71)]
    assert set(Counter(offsets(windows, 2)).values()) == {2}


def test_replacements_of_lost_windows_are_spread():
    """A third of the windows is lost. Replacements come from the whole range and differ between epochs."""
    windows = Windows(0, 3001, 1, 3, [(1000, 999)])
    assert windows.lost == 1000
    read = Counter(offsets(windows))
    assert sum(read.values()) == 3000
    assert max(read.values()) <= 8
    # Each attempt is a permutation, so two thirds of the 1,000 lost samples find distinct windows at the first attempt.
    assert sum(number > 1 for number in read.values()) > 600
    again = Counter(windows.token_offset(index) for index in range(3000, 6000))
    assert again != read


def test_derived_seeds_differ():
    seeds = {derived_seed(seed, name) for seed in range(20) for name in ("C4", "ArXiv", "instead 1", "instead 2")}
    assert len(seeds) == 80
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert derived_seed(1234, "C4") == 4306377510028374983


@pytest.mark.parametrize("tokens", [0, 1, T])
def test_range_too_short_for_a_window(tokens):
    assert Windows(0, tokens, T, 0).total == 0
