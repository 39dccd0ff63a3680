"""Benchmark of data loading: throughput by sample length and number of shards, and time to a first batch."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np

from megatron_ext.bench.loader.report import LoaderRow, Resume
from megatron_ext.data.batches import micro_batch_indices, training_batch
from megatron_ext.data.opening import open_samples, shard_files
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.data.verified import ShardVerifier, read_verified, write_verified
from megatron_ext.data.verify import verify_shards

TOKEN_BYTES = 2 + 3 * 8 + 4
"""Minimum number of bytes moved per token: stored token, input, label, position and loss weight."""

SEED = 1234

WorkT = TypeVar("WorkT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Reading:
    """Work of one reading rank.

    Attributes:
        root: prepared folder.
        length: tokens per sample.
        batch: samples per micro-batch.
        rank: data-parallel rank.
        ranks: number of ranks that read concurrently.
        seconds: duration of reading.
    """

    root: Path
    length: int
    batch: int
    rank: int
    ranks: int
    seconds: float


def read_rank(reading: Reading) -> tuple[float, float]:
    """Return tokens per second and per processor second of one rank, including the opening of shards."""
    samples, _ = open_samples(reading.root, reading.length, SEED)
    _micro_batch(samples, reading, 0)  # warm-up of torch
    num_batches, wall_seconds, cpu_seconds = read_for_seconds(samples, reading, 0)
    tokens = num_batches * reading.batch * reading.length
    return tokens / wall_seconds, tokens / cpu_seconds


def read_for_seconds(samples: TrainingSamples, reading: Reading, number: int) -> tuple[int, float, float]:
    """Read further micro-batches for `reading.seconds`, at least one.

    Args:
        samples: samples to read from.
        reading: work of this rank.
        number: index of the micro-batch after which to continue.

    Returns:
        Index of the last micro-batch, and the seconds and processor seconds taken.
    """
    started, cpu_started = time.perf_counter(), time.process_time()
    while True:  # at least one micro-batch, even if the process is descheduled for longer than `reading.seconds`
        number += 1
        _micro_batch(samples, reading, number)
        if (seconds := time.perf_counter() - started) >= reading.seconds:
            return number, seconds, time.process_time() - cpu_started


def _micro_batch(samples: TrainingSamples, reading: Reading, number: int) -> None:
    training_batch(samples, micro_batch_indices(0, number, reading.batch, reading.rank, reading.ranks))


def run_concurrently(function: Callable[[WorkT], ResultT], ranks: Sequence[WorkT]) -> list[ResultT]:
    """Call `function` for all ranks concurrently, each in its own process. A single rank runs in this process."""
    if len(ranks) == 1:
        return [function(ranks[0])]
    with multiprocessing.get_context("spawn").Pool(len(ranks)) as pool:
        return pool.map(function, ranks, chunksize=1)


def measure(root: Path, shards: int, length: int, batch: int, ranks: int, seconds: float, *, cold: bool) -> LoaderRow:
    """Measure reading with several concurrent processes.

    Args:
        root: prepared folder.
        shards: number of shards of the folder's training text.
        length: tokens per sample.
        batch: samples per micro-batch.
        ranks: number of processes.
        seconds: duration of reading.
        cold: True: drop the files from the page cache first. False: read them into the page cache first.
    """
    for path in shard_files(root):
        if cold:
            _drop_page_cache(path)
        else:
            path.read_bytes()
    upper_bound = copy_rate(batch * length)
    speeds = run_concurrently(read_rank, [Reading(root, length, batch, rank, ranks, seconds) for rank in range(ranks)])
    per_second, per_cpu_second = (sum(speed) for speed in zip(*speeds, strict=True))
    return LoaderRow(shards, length, batch, ranks, cold, per_second, per_cpu_second / ranks, upper_bound)


def verify_once(root: Path, folder: Path) -> None:
    """Compare the sha256 of all training text and write the record to a folder, as the first start of a run does."""
    verified, (_, manifest) = ShardVerifier(root, {}), open_samples(root, 1, SEED)
    verify_shards(root, manifest, ["train"], check=verified.check)
    write_verified(folder, verified.stamps)


def resume(root: Path, shards: int, length: int, sample: int, repeat: int, folder: Path) -> Resume:
    """Measure the seconds until the first sample of a resumed run, with the files dropped from the page cache.

    Args:
        root: prepared folder.
        shards: number of shards of the folder's training text.
        length: tokens per sample.
        sample: number of samples that the run has read before.
        repeat: number of repetitions. The result contains their medians.
        folder: folder to which `verify_once` wrote.
    """
    open_seconds, checked_seconds = [], []
    for _ in range(repeat):
        for path in shard_files(root):
            _drop_page_cache(path)
        started = time.perf_counter()
        samples, manifest = open_samples(root, length, SEED)
        training_batch(samples, [sample])
        open_seconds.append(time.perf_counter() - started)
        verified = ShardVerifier(root, read_verified(folder))
        verify_shards(root, manifest, ["train"], check=verified.check)
        checked_seconds.append(time.perf_counter() - started)
        assert verified.num_unchanged == len(verified.stamps), "files changed while they were read"
    return Resume(shards, length, sample, median(open_seconds), median(checked_seconds))


def _drop_page_cache(path: Path) -> None:
    """Ask the operating system to drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # dirty pages cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def copy_rate(tokens: int, seconds: float = 0.3) -> float:
    """Return the tokens per second at which one core copies the bytes of a micro-batch in memory, an upper bound."""
    source = np.ones(tokens * TOKEN_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    durations: list[float] = []
    deadline = time.perf_counter() + seconds
    while not durations or time.perf_counter() < deadline:
        started = time.perf_counter()
        np.copyto(target, source)
        durations.append(time.perf_counter() - started)
    return tokens / median(durations)
