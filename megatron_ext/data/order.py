"""Sample order: a pure function of (seed, sample index), in constant memory.

Sample `index` of a run belongs to epoch `index // num_samples`. Within an epoch the windows are read in the order of a
pseudo-random permutation. The permutation is a Feistel network on the smallest even number of bits that can represent
the windows, with cycle walking: a value outside the range is permuted again until it is inside. A checkpoint stores its
data position as one integer, so the permutation must never change.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

ROUNDS = 6
MIN_HALF_BITS = 4
"""Minimum number of bits in each half of a value. With fewer bits there are too few distinct round functions."""

_MASK = 0xFFFFFFFFFFFFFFFF
_U64 = npt.NDArray[np.uint64]


def sample_position(seed: int, index: int, num_samples: int) -> int:
    """Return the index of the window that a run reads as its sample `index`.

    Python integers are used because they are 20 times as fast for one sample as arrays of one element.

    Args:
        seed: seed of the order.
        index: index of the sample in the run, unbounded. Every `num_samples` samples a new epoch begins.
        num_samples: number of windows, above 0.

    Returns:
        A window index in [0, num_samples). An epoch contains each window exactly once.

    Raises:
        ValueError: `num_samples` is not positive or the index is negative.
    """
    if num_samples < 1 or index < 0:
        raise ValueError(f"{num_samples} samples, smallest index {index}")
    half_bits = _half_bits(num_samples)
    mask = (1 << half_bits) - 1
    epoch, value = divmod(index, num_samples)
    keys = _round_keys(seed, epoch)
    while True:
        left, right = value >> half_bits, value & mask
        for key in keys:
            left, right = right, left ^ (_mix_int(right ^ key) & mask)
        value = (left << half_bits) | right
        if value < num_samples:
            return value


def _half_bits(num_samples: int) -> int:
    return max(MIN_HALF_BITS, ((num_samples - 1).bit_length() + 1) // 2)


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    key = _mix_int((_mix_int(seed & _MASK) + epoch) & _MASK)
    return tuple(_mix_int((key + index) & _MASK) for index in range(ROUNDS))


def _mix_int(value: int) -> int:
    """Apply `_mix` to one integer."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample_positions(seed: int, indices: npt.NDArray[np.int64], num_samples: int) -> npt.NDArray[np.int64]:
    """Return the window indices of many samples at once (vectorized `sample_position`).

    Args:
        seed: seed of the order.
        indices: sample indices, int64 array [n], each >= 0.
        num_samples: number of windows, above 0.

    Returns:
        int64 array [n].

    Raises:
        ValueError: `num_samples` is not positive or an index is negative.
    """
    if num_samples < 1 or (len(indices) and int(indices.min()) < 0):
        raise ValueError(f"{num_samples} samples, smallest index {indices.min(initial=0)}")
    half_bits = _half_bits(num_samples)
    epochs, positions = np.divmod(indices, num_samples)
    with np.errstate(over="ignore"):  # the hash uses arithmetic modulo 2**64
        keys = _mix(_mix(np.uint64(seed & _MASK)) + epochs.astype(np.uint64))
        values = positions.astype(np.uint64)
        outside = np.ones(len(values), dtype=bool)
        while outside.any():
            values[outside] = _feistel(values[outside], keys[outside], half_bits)
            outside = values >= num_samples
    return values.astype(np.int64)


def _feistel(values: _U64, keys: _U64, half_bits: int) -> _U64:
    """Permute [0, 2**(2 * half_bits)) with one key per value."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for index in range(ROUNDS):
        round_keys = _mix(keys + np.uint64(index))
        left, right = right, left ^ (_mix(right ^ round_keys) & mask)
    return (left << shift) | right


def _mix(value: np.uint64 | _U64) -> _U64:
    """Hash 64-bit integers bijectively, with SplitMix64 (Steele, Lea and Flood 2014)."""
    mixed = np.asarray(value + np.uint64(0x9E3779B97F4A7C15), dtype=np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
