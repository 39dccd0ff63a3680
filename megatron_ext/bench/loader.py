"""How fast batches are read, by context length and number of shards, and how soon a run that resumes has its first."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from data_prep.manifest import load_manifest
from megatron_ext.bench.loader_report import Resume, Row
from megatron_ext.data.batches import micro_batch_indices, training_batch
from megatron_ext.data.opening import open_samples, shard_files
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.data.shards import open_shards
from megatron_ext.data.verified import Verified, read_verified, write_verified
from megatron_ext.data.verify import verify_shards

TOKEN_BYTES = 2 + 3 * 8 + 4
"""A token as it is stored, and as an input, a label, a position and a weight: what must be moved at the least."""

SEED = 1234


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


def read(reading: Reading) -> tuple[float, float, float]:
    """Tokens a second of one rank, and a second of its processor, from its first batch on; the last in as long again.

    What opening each shard costs is in the first two, and hardly in the third.
    """
    samples, _ = open_samples(reading.root, reading.length, SEED)
    _micro_batch(samples, reading, 0)  # torch has been used once
    first, wall, work = _timed(samples, reading, 0)
    number, _, work_later = _timed(samples, reading, first)
    tokens = reading.batch * reading.length
    return first * tokens / wall, first * tokens / work, (number - first) * tokens / work_later


def _timed(samples: TrainingSamples, reading: Reading, number: int) -> tuple[int, float, float]:
    """Read on behind a micro-batch: the number of the last, seconds, and seconds of the processor."""
    started, worked = time.perf_counter(), time.process_time()
    while time.perf_counter() - started < reading.seconds:
        number += 1
        _micro_batch(samples, reading, number)
    return number, time.perf_counter() - started, time.process_time() - worked


def _micro_batch(samples: TrainingSamples, reading: Reading, number: int) -> None:
    training_batch(samples, micro_batch_indices(0, number, reading.batch, reading.rank, reading.ranks))


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
    best, bare = floor(batch * length), None if cold else bare_reads(root, length)
    readings = [Reading(root, length, batch, rank, ranks, seconds) for rank in range(ranks)]
    if ranks == 1:
        speeds = [read(readings[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(ranks) as pool:
            speeds = pool.map(read, readings, chunksize=1)
    wall, work, later = (sum(speed) for speed in zip(*speeds, strict=True))
    return Row(shards, length, batch, ranks, cold, wall, work / ranks, later / ranks, best, bare)


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


def bare_reads(root: Path, length: int, seconds: float = 0.5) -> float:
    """Tokens a processor second that one core reads and does nothing else with, from files held open.

    As many bytes as a sample spans, at random places of the tars, into one buffer: what is slower with more shards here
    is so by the memory of the machine.

    Args:
        root: a prepared folder.
        length: tokens a sample.
        seconds: of the processor, to read for.
    """
    shards, chance = (
        [shard for entry in load_manifest(root).select("train") for shard in entry.shards],
        random.Random(0),
    )
    chosen = chance.sample(shards, min(len(shards), open_shards()))
    opened = [(os.open(root / shard.file, os.O_RDONLY), shard) for shard in chosen]
    buffer = memoryview(bytearray(max(shard.bytes for shard in chosen)))
    tokens, started = 0, time.process_time()
    try:
        while time.process_time() - started < seconds:
            for _ in range(100):
                descriptor, shard = chance.choice(opened)
                part = min(length, shard.tokens)
                size = shard.bytes * part // shard.tokens
                os.preadv(descriptor, [buffer[:size]], chance.randrange(shard.bytes - size + 1))
                tokens += part
        return tokens / (time.process_time() - started)
    finally:
        for descriptor, _ in opened:
            os.close(descriptor)
