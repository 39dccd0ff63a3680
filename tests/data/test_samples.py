import shutil

import numpy as np
import pytest

from megatron_ext.data.order import sample_positions
from megatron_ext.data.samples import EvaluationSamples, TrainingSamples
from megatron_ext.utils.errors import UserError

T = 37


def test_windows_cover_the_stream_in_the_sample_order(store, documents):
    samples = TrainingSamples(store, T, seed=11)
    stream = np.concatenate(documents["train"])
    assert samples.num_windows == (len(stream) - 1) // T
    order = sample_positions(11, np.arange(2 * samples.num_windows), samples.num_windows)
    for index, window in enumerate(order.tolist()):
        sample = samples[index]
        assert sample.dtype == np.uint16  # the dtype of the files
        assert np.array_equal(sample, stream[window * T : window * T + T + 1])
    labels = np.sort(np.concatenate([samples[i][1:] for i in range(samples.num_windows)]))
    assert np.array_equal(labels, np.sort(stream[1 : samples.num_windows * T + 1]))  # every label once per epoch


def test_resumed_run_reads_the_same_samples(prepared, manifest, store):
    whole = [TrainingSamples(store, T, 3)[i] for i in range(100)]
    resumed = TrainingSamples(type(store)(prepared, manifest, "train"), T, 3)
    assert all(np.array_equal(resumed[i], whole[i]) for i in range(61, 100))


@pytest.mark.parametrize("weights", [None, {"C4": 0.7, "CommonCrawl": 0.3}])
def test_lost_shard_leaves_other_samples_unchanged(prepared, manifest, store, tmp_path, weights):
    whole = TrainingSamples(store, T, 3, weights)
    entry = manifest.select("train", ["CommonCrawl"])[0].shards[1]
    root = shutil.copytree(prepared, tmp_path / "copy")
    (root / entry.file).unlink()
    without = TrainingSamples(type(store)(root, manifest, "train"), T, 3, weights, [entry.file])
    first, length = store.shard_range(entry.file)
    assert length == entry.tokens
    assert (without.num_windows, whole.lost_windows) == (whole.num_windows, 0)
    assert length // T <= without.lost_windows <= length // T + 2
    changed = 0
    for index in range(2 * whole.num_windows):
        sample, place = without[index], whole.token_offset(index)  # the missing file is never read
        if place < first + length and place + T >= first:
            changed += 1
        else:
            assert np.array_equal(sample, whole[index])
    assert weights or changed == 2 * without.lost_windows


def test_mostly_lost_domain_is_an_error(store, manifest):
    shards = [shard.file for shard in manifest.select("train", ["C4"])[0].shards]
    with pytest.raises(UserError, match=r"^data.on_damaged: skip would drop (\d+) of the \1 samples per epoch of C4; "):
        TrainingSamples(store, T, 3, {"C4": 1, "CommonCrawl": 1}, shards)
    TrainingSamples(store, T, 3, {"C4": 0, "CommonCrawl": 1}, shards)


def test_longest_possible_window(store):
    stream = store.read(0, store.num_tokens)
    samples = TrainingSamples(store, store.num_tokens - 1, 0)
    assert samples.num_windows == 1
    assert np.array_equal(samples[5], stream)
    with pytest.raises(UserError) as caught:
        TrainingSamples(store, store.num_tokens, 0)
    assert str(caught.value) == (
        f"data.seq_length: {store.num_tokens} needs {store.num_tokens + 1} tokens, but the training data has "
        f"{store.num_tokens}; provide more data or reduce it"
    )


@pytest.mark.parametrize("length", [1, T, 100_000])
def test_evaluation_counts_every_label_once(store, documents, length):
    samples = EvaluationSamples(store, length)
    stream = np.concatenate(documents["train"])
    ids = np.repeat(np.arange(len(documents["train"])), [len(item) for item in documents["train"]])
    read = [samples[i] for i in range(len(samples))]
    for item in read:
        assert item.tokens.shape == (length + 1,)
        assert (item.loss_mask.dtype, item.document_ids.dtype) == (np.float32, np.int64)
        assert np.array_equal(item.loss_mask == 1, item.document_ids >= 0)
        assert not item.tokens[1:][item.loss_mask == 0].any()
    real = [item.loss_mask == 1 for item in read]
    for part, expected in (
        (lambda item: item.tokens[:-1], stream[:-1]),
        (lambda item: item.tokens[1:], stream[1:]),
        (lambda item: item.document_ids, ids[1:]),
    ):
        assert np.array_equal(
            np.concatenate([part(item)[mask] for item, mask in zip(read, real, strict=True)]), expected
        )


def test_limited_evaluation_is_spread_over_the_stream(store):
    everything, some = EvaluationSamples(store, T), EvaluationSamples(store, T, max_samples=7)
    assert len(some) == 7
    whole = [everything[i].tokens.tolist() for i in range(len(everything))]
    places = [whole.index(some[i].tokens.tolist()) for i in range(7)]
    assert places[0] == 0
    gaps = np.diff([*places, len(everything)])
    assert gaps.min() >= len(everything) // 7
    assert gaps.max() <= -(-len(everything) // 7)
    assert len(EvaluationSamples(store, T, max_samples=10**6)) == len(everything)


def test_beyond_the_end_is_padding(store):
    samples = EvaluationSamples(store, T, max_samples=3)
    extra = samples[3]
    assert not extra.tokens.any()
    assert not extra.loss_mask.any()
    assert (extra.document_ids == -1).all()


def test_nothing_to_evaluate(store, monkeypatch):
    monkeypatch.setattr(type(store), "num_tokens", 1)
    with pytest.raises(UserError, match=r"^data.test_domains: C4, CommonCrawl has only 1 tokens to evaluate; "):
        EvaluationSamples(store, T)
