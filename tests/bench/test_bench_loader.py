"""Benchmark of loading: random data is valid prepared data, and the report follows from the numbers."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import webdataset

from megatron_ext.bench.loader import run
from megatron_ext.bench.loader import turns as loader_turns
from megatron_ext.bench.loader.report import LoaderReport, LoaderRow, Resume, Turns
from megatron_ext.cli import main
from megatron_ext.data.opening import open_samples
from megatron_ext.data.random_data import make_random_data
from megatron_ext.data.shards import TokenStore
from megatron_ext.data.verify import verify_shards


def test_random_data_is_prepared_data(tmp_path: Path) -> None:
    manifest = make_random_data(tmp_path, 2, 5000, seed=3)
    assert verify_shards(tmp_path, manifest) == 2
    store = TokenStore(tmp_path, manifest, "train")
    assert (store.num_tokens, store.domains) == (10_000, ["Random"])
    documents = [
        sample["tokens.npy"]
        for shard in sorted(tmp_path.rglob("*.tar"))
        for sample in webdataset.WebDataset(str(shard), shardshuffle=False).decode()
    ]
    assert np.array_equal(store.read(0, 10_000), np.concatenate(documents))
    assert store.num_documents == len(documents) > 4
    assert len({len(document) for document in documents}) > 2


def test_tokens_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_random_data(tmp_path, 1, 3000, seed=3)
    read: list[int] = []
    given = run.training_batch

    def recording(samples, indices, *rest):  # type: ignore[no-untyped-def]
        read.extend(indices)
        return given(samples, indices, *rest)

    monkeypatch.setattr(run, "training_batch", recording)
    clock = iter(range(100))
    monkeypatch.setattr(run.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(run.time, "process_time", iter((10.0, 12.0)).__next__)
    # One warm-up batch. Then the clock is read once per batch, and shows 3 s after the third one.
    assert run.read_rank(run.Reading(tmp_path, 100, 2, 1, 2, 3.0)) == (600 / 3, 600 / 2)
    assert read == [2, 3, 6, 7, 10, 11, 14, 15]  # for the second of two ranks


def test_at_least_one_batch_is_read(tmp_path: Path) -> None:
    make_random_data(tmp_path, 1, 3000, seed=3)
    samples, _ = open_samples(tmp_path, 100, run.SEED)
    assert run.read_for_seconds(samples, run.Reading(tmp_path, 100, 2, 0, 1, seconds=0.0), 4)[0] == 5


def test_raw_reads_have_size_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_random_data(tmp_path, 3, 3000, seed=3)
    shard, read = manifest.domains[0].shards[0], set[tuple[int, bool]]()
    before, given = len(os.listdir("/proc/self/fd")), os.preadv

    def recording(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        size = given(descriptor, buffers, offset)
        read.add((size, len(buffers[0]) == size))
        return size

    monkeypatch.setattr(os, "preadv", recording)
    for length, expected in ((300, 4 / 100), (3_000_000, 4 / 100 * 1000)):  # at most one shard
        monkeypatch.setattr(loader_turns.time, "process_time", iter((10.0, 10.1, 12.0, 14.0)).__next__)
        with loader_turns.raw_reads(tmp_path, manifest, length, max_open=2) as raw_read:
            assert len(os.listdir("/proc/self/fd")) == before + 2
            assert raw_read(1.0) == pytest.approx(expected)
    assert read == {(shard.bytes // 10, True), (shard.bytes, True)}
    assert len(os.listdir("/proc/self/fd")) == before


def test_folders_are_read_in_alternation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = {tmp_path / "few": 2, tmp_path / "many": 5}
    for root, shards in roots.items():
        make_random_data(root, shards, 3000, seed=shards)
    expected = {root: open_samples(root, 100, run.SEED)[0] for root in roots}
    taken: list[Path] = []
    read: dict[Path, list[int]] = {root: [] for root in roots}
    alone: dict[Path, set[Path]] = {root: set() for root in roots}
    given, batch_of, reads = loader_turns.read_for_seconds, run.training_batch, os.preadv

    def turn(samples, reading, number):  # type: ignore[no-untyped-def]
        taken.append(reading.root)
        assert len(samples._store._open) == roots[reading.root]  # also before the first sample
        return given(samples, reading, number)

    def batch(samples, indices, *rest):  # type: ignore[no-untyped-def]
        found = batch_of(samples, indices, *rest)
        wanted = np.stack([expected[taken[-1]][index] for index in indices])
        assert np.array_equal(found.tokens, wanted[:, :-1])
        read[taken[-1]].extend(indices)
        return found

    def preadv(descriptor: int, *rest) -> int:  # type: ignore[no-untyped-def]
        alone[taken[-1]].add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        return reads(descriptor, *rest)

    monkeypatch.setattr(loader_turns, "TURN_SECONDS", 0.002)
    monkeypatch.setattr(loader_turns, "read_for_seconds", turn)
    monkeypatch.setattr(run, "training_batch", batch)
    monkeypatch.setattr(os, "preadv", preadv)
    turns = loader_turns.measure_turns(roots, 100, 2, 1, 0.008)
    few, many = roots
    assert taken == [few, many, many, few, few, many, many, few, few, many]  # the first round is a warm-up
    for root, one in zip(roots, turns, strict=True):
        assert (one.shards, one.length, one.ranks) == (roots[root], 100, 1)
        assert (len(one.sample_seconds), len(one.bare_seconds)) == (4, 4)
        assert min(*one.sample_seconds, *one.bare_seconds) > 0
        assert read[root] == list(range(2, 2 + len(read[root])))
        assert alone[root] == set(root.rglob("*.tar"))


def test_open_files_stay_within_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_random_data(tmp_path, 8, 3000, seed=3)
    monkeypatch.setattr(loader_turns, "max_open_shards", lambda: 4)  # with 32 files
    before = len(os.listdir("/proc/self/fd"))
    reading = run.Reading(tmp_path, 100, 2, 0, 1, 1.0)
    for folders, files in ((2, 4 * 2 + 2), (3, 4 * 2 + 1), (4, 3 * 2 + 1)):
        with loader_turns._folder(reading, folders):
            assert len(os.listdir("/proc/self/fd")) == before + files


def test_the_report_by_hand(tmp_path: Path) -> None:
    rows = [
        LoaderRow(10, 2048, 4, 2, False, 2.5e7, 1.2e7, 1e8),
        LoaderRow(10, 2048, 4, 2, True, 2e7, 1e7, 1e8),
    ]
    turns = [
        Turns(1000, 2048, 2, [50e-6, 66e-6, 42e-6, 44e-6], [3e-6, 5e-6, 3e-6, 4e-6]),
        Turns(10, 2048, 2, [40e-6, 60e-6, 42e-6, 40e-6], [2e-6, 2e-6, 2e-6, 2e-6]),
        Turns(10, 102400, 2, [400e-6], [40e-6]),
    ]
    resumes = [Resume(1000, 102400, 32_000_000, 0.05, 0.25)]
    report = LoaderReport(data="`data`", machine={"torch": "2"}, seconds=5, rows=rows, turns=turns, resumes=resumes)
    report.write(tmp_path)
    text = (tmp_path / "loader.md").read_text()
    assert "`data`. Each row was read for 5 s. Upper bound" in text
    assert "| 10 | 2,048 | 4 | 2 | in page cache | 25.0 | 12.0 | 12 % |" in text
    assert "| 10 | 2,048 | 4 | 2 | on disk | 20.0 | 10.0 | 10 % |" in text
    alone = "3.5 (3.0 to 5.0) | 1.75 (1.50 to 2.50)"
    assert f"| 1,000 | 2,048 | 2 | 47.0 (42.0 to 66.0) | 1.10 (1.00 to 1.25) | {alone} |" in text
    assert "| 10 | 2,048 | 2 | 41.0 (40.0 to 60.0) |  | 2.0 (2.0 to 2.0) |  |" in text
    assert "| 10 | 102,400 | 2 | 400.0 (400.0 to 400.0) |  |" in text
    assert "in alternation, 5 s each" in text
    assert "in alternation" not in replace(report, turns=[]).markdown()
    assert "| 1,000 | 102,400 | 32,000,000 | 50 | 250 |" in text
    raw = json.loads((tmp_path / "loader.json").read_text())
    assert raw["rows"][0]["floor"] == 1e8
    assert raw["rows"][0]["tokens_per_second"] == 2.5e7
    assert raw["turns"][0]["bare_seconds"] == [3e-6, 5e-6, 3e-6, 4e-6]
    assert raw["resumes"][0]["seconds_checked"] == 0.25


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shards", "1,2", "--shard-tokens", "3000", "--lengths", "64", "--ranks", "1", "--samples", "0,1000"]
    assert main(["bench", "loader", *options, "--seconds", "0.05", "--output", str(tmp_path)]) == 0
    raw = json.loads((tmp_path / "loader.json").read_text())
    assert [(row["shards"], row["batch"], row["cold"]) for row in raw["rows"]] == [
        (1, 128, False),
        (1, 128, True),
        (2, 128, False),
        (2, 128, True),
    ]
    assert all(row["tokens_per_second"] > 0 for row in raw["rows"])
    assert [(one["shards"], one["length"], one["ranks"], len(one["sample_seconds"])) for one in raw["turns"]] == [
        (1, 64, 1, 2),
        (2, 64, 1, 2),
    ]
    assert [(one["shards"], one["sample"]) for one in raw["resumes"]] == [(1, 0), (1, 1000), (2, 0), (2, 1000)]
    assert capsys.readouterr().out == (tmp_path / "loader.md").read_text() + "\n"
    assert {path.name for path in tmp_path.iterdir()} == {"loader.json", "loader.md"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "2k"], "--lengths: '2k' is not a list of integers >= 1; write it like 10,100"),
        (["--ranks", "0"], "--ranks: '0' is not a list of integers >= 1; write it like 10,100"),
        (["--shards", ","], "--shards: ',' is not a list of integers >= 1; write it like 10,100"),
        (["--seconds", "0"], "--seconds: 0.0 is not above 0; give a positive number"),
        (["--shard-tokens", "0"], "--shard-tokens: 0 is less than 1; give 1 or more"),
        (["--data", "nowhere"], "nowhere/manifest.json: cannot be read (No such file or directory)"),
    ],
)
def test_invalid_options(options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "loader", *options, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
