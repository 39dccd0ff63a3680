"""The benchmark of loading: random data is prepared data, and the report follows from its numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import webdataset

from megatron_ext.bench import loader
from megatron_ext.bench.loader_report import Report, Resume, Row
from megatron_ext.cli import main
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
    given = loader.training_batch

    def noting(samples, indices, *rest):  # type: ignore[no-untyped-def]
        read.extend(indices)
        return given(samples, indices, *rest)

    monkeypatch.setattr(loader, "training_batch", noting)
    clock = iter(range(100))
    monkeypatch.setattr(loader.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(loader.time, "process_time", iter((10.0, 12.0, 20.0, 25.0)).__next__)
    # One batch to warm up; then the clock is read once a batch and stands at 3 and, at the end, 4 s. So a second time.
    assert loader.read(loader.Reading(tmp_path, 100, 2, 1, 2, 3.0)) == (400 / 4, 400 / 2, 400 / 5)
    assert read == [2, 3, 6, 7, 10, 11, 14, 15, 18, 19]  # the second of two ranks


def test_bare_reads_are_of_the_bytes_that_samples_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_random_data(tmp_path, 3, 3000, seed=3)
    shard, read = manifest.domains[0].shards[0], set[tuple[int, bool]]()
    before, given = len(os.listdir("/proc/self/fd")), os.preadv

    def noting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        size = given(descriptor, buffers, offset)
        read.add((size, len(buffers[0]) == size))
        return size

    monkeypatch.setattr(os, "preadv", noting)
    monkeypatch.setattr(loader.time, "process_time", iter((10.0, 10.1, 12.0, 14.0)).__next__)
    assert loader.bare_reads(tmp_path, 300) == 300 * 100 / 4
    monkeypatch.setattr(loader.time, "process_time", iter((10.0, 10.1, 12.0, 14.0)).__next__)
    assert loader.bare_reads(tmp_path, 3_000_000) == 3000 * 100 / 4  # no more than a shard
    assert read == {(shard.bytes // 10, True), (shard.bytes, True)}
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_report_by_hand(tmp_path: Path) -> None:
    rows = [
        Row(10, 2048, 4, 2, False, 2.5e7, 1.2e7, 1.6e7, 1e8, 8e8),
        Row(10, 2048, 4, 2, True, 2e7, 1e7, 1e7, 1e8, None),
        Row(1000, 2048, 4, 2, False, 2e7, 1e7, 1.28e7, 1e8, 4e8),
    ]
    resumes = [Resume(1000, 102400, 32_000_000, 0.05, 0.25)]
    report = Report("`data`", {"torch": "2"}, 5, rows, resumes)
    report.write(tmp_path)
    text = (tmp_path / "loader.md").read_text()
    assert "`data`. Each row was read for 5 s, then for as long again." in text
    assert "| 10 | 2,048 | 4 | 2 | in memory | 25.0 | 12.0 | 16.0 | 12 % |" in text
    assert "| 10 | 2,048 | 4 | 2 | on the disk | 20.0 | 10.0 | 10.0 | 10 % |" in text
    # 128 and 160 microseconds a sample later on; reads alone 2.56 and 5.12
    assert "| 1,000 / 10 | 2,048 | 2 | 1.20 | 1.25 | 2.00 | 32.0 | 2.6 |" in text
    assert "Processor time" not in Report("`data`", {"torch": "2"}, 5, rows[:2], resumes).markdown()
    assert "| 1,000 | 102,400 | 32,000,000 | 50 | 250 |" in text
    raw = json.loads((tmp_path / "loader.json").read_text())
    assert raw["rows"][0]["floor"] == 1e8
    assert raw["rows"][0]["tokens_per_second"] == 2.5e7
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
    assert [(one["shards"], one["sample"]) for one in raw["resumes"]] == [(1, 0), (1, 1000), (2, 0), (2, 1000)]
    assert capsys.readouterr().out == (tmp_path / "loader.md").read_text() + "\n"
    assert {path.name for path in tmp_path.iterdir()} == {"loader.json", "loader.md"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--lengths", "2k"], "--lengths: '2k' is no list of whole numbers from 1 on; write it like 10,100"),
        (["--ranks", "0"], "--ranks: '0' is no list of whole numbers from 1 on; write it like 10,100"),
        (["--shards", ","], "--shards: ',' is no list of whole numbers from 1 on; write it like 10,100"),
        (["--seconds", "0"], "--seconds: 0.0 is not above 0; give some seconds"),
        (["--shard-tokens", "0"], "--shard-tokens: 0 is less than 1; give 1 or more"),
        (["--data", "nowhere"], "nowhere/manifest.json: cannot be read (No such file or directory)"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "loader", *options, "--output", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
