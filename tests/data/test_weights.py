"""Blends by domain weight, from text to tokens, compared with streams that webdataset alone reads."""

from collections import Counter

import numpy as np
import pytest

from megatron_ext.data.batches import micro_batch_indices, training_batch
from megatron_ext.data.order import sample_positions
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.data.shards import TokenStore
from megatron_ext.data.weights import domain_weights
from megatron_ext.data.windows import derived_seed
from megatron_ext.utils.errors import UserError

T = 37
WEIGHTS = {"C4": 0.6, "CommonCrawl": 0.4}
TRAIN = ["C4", "CommonCrawl"]


@pytest.fixture
def samples(store) -> TrainingSamples:
    return TrainingSamples(store, T, 3, WEIGHTS)


@pytest.fixture
def streams(prepared, manifest) -> dict[str, np.ndarray]:
    stores = {name: TokenStore(prepared, manifest, "train", [name]) for name in TRAIN}
    return {name: store.read(0, store.num_tokens) for name, store in stores.items()}


def slowly(streams: dict[str, np.ndarray], seed: int, upto: int) -> list[np.ndarray]:
    """Compute the first samples one by one: three of C4 for every two of CommonCrawl."""
    orders, given, found = {}, Counter(), []
    for name, stream in streams.items():
        total = (len(stream) - 1) // T
        orders[name] = sample_positions(derived_seed(seed, name), np.arange(upto), total)
    for index in range(upto):
        name = "C4" if 5 * given["C4"] + 2 < 3 * index + 3 else "CommonCrawl"  # 0.6 * (index + 1), rounded
        start = int(orders[name][given[name]]) * T
        found.append(streams[name][start : start + T + 1])
        given[name] += 1
    return found


def test_samples_equal_a_sequential_reference(samples, streams):
    slow = slowly(streams, 3, 4 * samples.num_windows)
    assert all(np.array_equal(samples[index], sample) for index, sample in enumerate(slow))


def test_samples_do_not_cross_domains(samples, streams):
    views = [np.lib.stride_tricks.sliding_window_view(stream, T + 1) for stream in streams.values()]
    windows = {window.tobytes() for view in views for window in view}
    assert all(samples[index].tobytes() in windows for index in range(samples.num_windows))


def test_resumed_samples_are_unchanged(samples, prepared, manifest):
    whole = [samples[index] for index in range(60)]
    resumed = TrainingSamples(TokenStore(prepared, manifest, "train"), T, 3, WEIGHTS)
    assert all(np.array_equal(resumed[index], whole[index]) for index in range(59, 30, -1))


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_step_is_independent_of_the_number_of_ranks(samples, dp_size):
    rows = [
        row
        for rank in range(dp_size)
        for micro_batch in range(8 // (2 * dp_size))
        for row in training_batch(samples, micro_batch_indices(16, micro_batch, 2, rank, dp_size)).tokens.tolist()
    ]
    assert sorted(rows) == sorted(samples[index][:-1].tolist() for index in range(16, 24))


def test_domain_with_weight_zero_is_not_read(store, streams):
    samples = TrainingSamples(store, T, 3, {"C4": 0.0, "CommonCrawl": 1.0})
    labels = np.sort(np.concatenate([samples[i][1:] for i in range((len(streams["CommonCrawl"]) - 1) // T)]))
    stream = streams["CommonCrawl"]
    assert np.array_equal(labels, np.sort(stream[1 : (len(stream) - 1) // T * T + 1]))


def test_domain_too_short_for_a_sample(store, streams):
    length = min(len(stream) for stream in streams.values())
    with pytest.raises(UserError, match=rf"data.seq_length: {length} needs {length + 1} tokens, but C4 has {length}; "):
        TrainingSamples(store, length, 0, WEIGHTS)
    TrainingSamples(store, length, 0, {"C4": 0, "CommonCrawl": 1})


def test_weights_by_long_or_short_names(manifest):
    assert domain_weights({"RedPajamaCommonCrawl": 2, "c4": 0}, TRAIN, manifest) == {"C4": 0, "CommonCrawl": 2}


@pytest.mark.parametrize(
    ("weights", "train", "message"),
    [
        ({"C4": 1, "Law": 1}, TRAIN, "no domain Law in the train split; choose from: C4, CommonCrawl"),
        (
            {"C4": 1, "CommonCrawl": 1},
            ["C4"],
            "CommonCrawl is not among data.train_domains (C4); add it there, or remove its weight",
        ),
        ({"C4": 1, "c4": 2}, TRAIN, "c4 has two weights under two names; give each domain one weight"),
        (
            {"C4": 1},
            TRAIN,
            "has no weight for CommonCrawl; give every training domain a weight (0: it is not read), "
            "or remove it from data.train_domains",
        ),
        ({"C4": -1, "CommonCrawl": 2}, TRAIN, "weights [-1, 2]; give each domain 0 or a larger weight, and not all 0"),
        ({"C4": 0, "CommonCrawl": 0}, TRAIN, "weights [0, 0]; give each domain 0 or a larger weight, and not all 0"),
        (
            {"C4": 1, "CommonCrawl": 1e-6},
            TRAIN,
            "weight 1e-06 is less than 1/100000 of the whole; give each domain 0 or a larger weight, and not all 0",
        ),
    ],
)
def test_invalid_weights(manifest, weights, train, message):
    with pytest.raises(UserError) as caught:
        domain_weights(weights, train, manifest)
    assert str(caught.value) == f"data.weights: {message}"
