"""How fast batches are read, by context length and number of shards, and how soon a run that resumes has its first."""

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

from megatron_ext.bench.loader_report import Resume, Row
from megatron_ext.data.batches import micro_batch_indices, training_batch
from megatron_ext.data.opening import open_samples, shard_files
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.data.verified import Verified, read_verified, write_verified
from megatron_ext.data.verify import verify_shards

TOKEN_BYTES = 2 + 3 * 8 + 4
"""A token as it is stored, and as an input, a label, a position and a weight: what must be moved at the least."""

SEED = 1234

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Reading:
    """What one rank reads.

    Attributes:
        root: a prepared folder.
        length: tokens a sample.
        batch: samples a micro-batch.
        rank: this one.
        ranks: how many read at once, each its data-parallel share.
        seconds: how long.
    """

    root: Path
    length: int
    batch: int
    rank: int
    ranks: int
    seconds: float


def read(reading: Reading) -> tuple[float, float]:
    """Tokens a second of one rank, and a second of its processor, from its first batch on: shards are opened in it."""
    samples, _ = open_samples(reading.root, reading.length, SEED)
    _micro_batch(samples, reading, 0)  # torch has been used once
    number, wall, work = timed(samples, reading, 0)
    tokens = number * reading.batch * reading.length
    return tokens / wall, tokens / work


def timed(samples: TrainingSamples, reading: Reading, number: int) -> tuple[int, float, float]:
    """Read on behind a micro-batch, at least one: the number of the last, seconds, and seconds of the processor."""
    started, worked = time.perf_counter(), time.process_time()
    while True:  # the system may hold the process up for longer than a turn before it has read anything
        number += 1
        _micro_batch(samples, reading, number)
        if (seconds := time.perf_counter() - started) >= reading.seconds:
            return number, seconds, time.process_time() - worked


def _micro_batch(samples: TrainingSamples, reading: Reading, number: int) -> None:
    training_batch(samples, micro_batch_indices(0, number, reading.batch, reading.rank, reading.ranks))


def at_once(work: Callable[[T], R], ranks: Sequence[T]) -> list[R]:
    """Let every rank work in a process of its own, all at once; a single one does so in this process."""
    if len(ranks) == 1:
        return [work(ranks[0])]
    with multiprocessing.get_context("spawn").Pool(len(ranks)) as pool:
        return pool.map(work, ranks, chunksize=1)


def measure(root: Path, shards: int, length: int, batch: int, ranks: int, seconds: float, *, cold: bool) -> Row:
    """Read with several processes at once.

    Args:
        root: a prepared folder.
        shards: that its training text is in.
        length: tokens a sample.
        batch: samples a micro-batch.
        ranks: processes.
        seconds: how long.
        cold: the operating system has forgotten the files before; else they are in its memory.
    """
    for path in shard_files(root):
        if cold:
            _forget(path)
        else:
            path.read_bytes()
    best = floor(batch * length)
    speeds = at_once(read, [Reading(root, length, batch, rank, ranks, seconds) for rank in range(ranks)])
    wall, work = (sum(speed) for speed in zip(*speeds, strict=True))
    return Row(shards, length, batch, ranks, cold, wall, work / ranks, best)


def verify_once(root: Path, folder: Path) -> None:
    """Compare the sha256 of all training text and keep the record in a folder, as the first start of a run does."""
    verified, (_, manifest) = Verified(root, {}), open_samples(root, 1, SEED)
    verify_shards(root, manifest, ["train"], check=verified.check)
    write_verified(folder, verified.found)


def resume(root: Path, shards: int, length: int, sample: int, repeat: int, folder: Path) -> Resume:
    """Seconds from nothing open to the first sample, with the operating system's copies of the files forgotten.

    Args:
        root: a prepared folder.
        shards: that its training text is in.
        length: tokens a sample.
        sample: how many the run has read before.
        repeat: how often; the median counts.
        folder: where `verify_once` was.
    """
    opening, checked = [], []
    for _ in range(repeat):
        for path in shard_files(root):
            _forget(path)
        started = time.perf_counter()
        samples, manifest = open_samples(root, length, SEED)
        training_batch(samples, [sample])
        opening.append(time.perf_counter() - started)
        verified = Verified(root, read_verified(folder))
        verify_shards(root, manifest, ["train"], check=verified.check)
        checked.append(time.perf_counter() - started)
        assert verified.unchanged == len(verified.found), "files changed while they were read"
    return Resume(shards, length, sample, median(opening), median(checked))


def _forget(path: Path) -> None:
    """Ask the operating system to drop what it keeps of a file in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # what is not on the disk yet cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def floor(tokens: int, seconds: float = 0.3) -> float:
    """Tokens a second that one core cannot pass: the bytes of a micro-batch, copied from memory to memory."""
    source = np.ones(tokens * TOKEN_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    spent: list[float] = []
    ends = time.perf_counter() + seconds
    while not spent or time.perf_counter() < ends:
        started = time.perf_counter()
        np.copyto(target, source)
        spent.append(time.perf_counter() - started)
    return tokens / median(spent)
