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

T = TypeVar("T")
R = TypeVar("R")


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


def read(reading: Reading) -> tuple[float, float]:
    """Return tokens per second and per processor second of one rank, including the opening of shards."""
    samples, _ = open_samples(reading.root, reading.length, SEED)
    _micro_batch(samples, reading, 0)  # warm-up of torch
    number, wall, work = timed(samples, reading, 0)
    tokens = number * reading.batch * reading.length
    return tokens / wall, tokens / work


def timed(samples: TrainingSamples, reading: Reading, number: int) -> tuple[int, float, float]:
    """Read further micro-batches for `reading.seconds`, at least one.

    Args:
        samples: samples to read from.
        reading: work of this rank.
        number: index of the micro-batch after which to continue.

    Returns:
        Index of the last micro-batch, and the seconds and processor seconds taken.
    """
    started, worked = time.perf_counter(), time.process_time()
    while True:  # at least one micro-batch, even if the process is descheduled for longer than `reading.seconds`
        number += 1
        _micro_batch(samples, reading, number)
        if (seconds := time.perf_counter() - started) >= reading.seconds:
            return number, seconds, time.process_time() - worked


def _micro_batch(samples: TrainingSamples, reading: Reading, number: int) -> None:
    training_batch(samples, micro_batch_indices(0, number, reading.batch, reading.rank, reading.ranks))


def at_once(work: Callable[[T], R], ranks: Sequence[T]) -> list[R]:
    """Run `work` for all ranks concurrently, each in its own process. A single rank runs in this process."""
    if len(ranks) == 1:
        return [work(ranks[0])]
    with multiprocessing.get_context("spawn").Pool(len(ranks)) as pool:
        return pool.map(work, ranks, chunksize=1)


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
            _forget(path)
        else:
            path.read_bytes()
    best = floor(batch * length)
    speeds = at_once(read, [Reading(root, length, batch, rank, ranks, seconds) for rank in range(ranks)])
    wall, work = (sum(speed) for speed in zip(*speeds, strict=True))
    return LoaderRow(shards, length, batch, ranks, cold, wall, work / ranks, best)


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
    opening, checked = [], []
    for _ in range(repeat):
        for path in shard_files(root):
            _forget(path)
        started = time.perf_counter()
        samples, manifest = open_samples(root, length, SEED)
        training_batch(samples, [sample])
        opening.append(time.perf_counter() - started)
        verified = ShardVerifier(root, read_verified(folder))
        verify_shards(root, manifest, ["train"], check=verified.check)
        checked.append(time.perf_counter() - started)
        assert verified.num_unchanged == len(verified.stamps), "files changed while they were read"
    return Resume(shards, length, sample, median(opening), median(checked))


def _forget(path: Path) -> None:
    """Ask the operating system to drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # dirty pages cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def floor(tokens: int, seconds: float = 0.3) -> float:
    """Return the tokens per second at which one core copies the bytes of a micro-batch in memory, an upper bound."""
    source = np.ones(tokens * TOKEN_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    spent: list[float] = []
    ends = time.perf_counter() + seconds
    while not spent or time.perf_counter() < ends:
        started = time.perf_counter()
        np.copyto(target, source)
        spent.append(time.perf_counter() - started)
    return tokens / median(spent)
