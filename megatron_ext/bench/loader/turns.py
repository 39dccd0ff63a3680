"""Reading time of a sample by number of shards, measured in alternation.

Alternation removes the drift of a machine's speed, which would distort measurements that are minutes apart.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from data_prep.manifest import Manifest, load_manifest
from megatron_ext.bench.loader.report import Turns
from megatron_ext.bench.loader.run import SEED, Reading, read_for_seconds, run_concurrently
from megatron_ext.data.opening import shard_files
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.data.shards import TokenStore, max_open_shards

TURN_SECONDS = 0.1
"""Seconds of sample reading per turn, enough for hundreds of samples. Raw reads take another quarter of this time."""


def measure_turns(roots: Mapping[Path, int], length: int, batch: int, ranks: int, seconds: float) -> list[Turns]:
    """Read several folders in alternation, with several concurrent processes.

    Args:
        roots: number of shards of the training text, by prepared folder.
        length: tokens per sample.
        batch: samples per micro-batch.
        ranks: number of processes.
        seconds: duration per folder.
    """
    for root in roots:
        for path in shard_files(root):
            for _ in range(2):  # the second read of a page has an extra cost in the kernel, which must not be measured
                path.read_bytes()
    readings = [[Reading(root, length, batch, rank, ranks, seconds) for root in roots] for rank in range(ranks)]
    by_rank = run_concurrently(alternate_folders, readings)
    return [
        Turns(shards, length, ranks, *zip(*(pair for rank in by_rank for pair in rank[index]), strict=True))
        for index, shards in enumerate(roots.values())
    ]


def alternate_folders(readings: Sequence[Reading]) -> list[list[tuple[float, float]]]:
    """Measure several folders in alternation, in this process.

    Args:
        readings: one reading per folder, equal except for `root`.

    Returns:
        For each folder and round, the processor seconds per sample, and those of raw reads of as many bytes.
    """
    rounds = 2 * math.ceil(readings[0].seconds / TURN_SECONDS / 2)  # even, because the order of folders alternates
    with ExitStack() as stack:
        folders = [stack.enter_context(_folder(reading, len(readings))) for reading in readings]
        measurements: list[list[tuple[float, float]]] = [[] for _ in folders]
        for round_ in range(-1, rounds):
            for index in range(len(folders))[:: 1 if round_ % 2 else -1]:
                measurement = folders[index]()
                if round_ >= 0:  # the first round is warm-up
                    measurements[index].append(measurement)
    return measurements


@contextmanager
def _folder(reading: Reading, num_folders: int) -> Iterator[Callable[[], tuple[float, float]]]:
    """Context manager that yields a function which measures a folder with open shards once; see `alternate_folders`."""
    # In training a store may use a quarter of the process's file limit. Four such stores would leave no file for raw
    # reads.
    max_open = max_open_shards()
    manifest = load_manifest(reading.root)
    store = TokenStore(reading.root, manifest, "train", max_open=max(1, min(max_open, 3 * max_open // num_folders)))
    samples, turn_reading = TrainingSamples(store, reading.length, SEED), replace(reading, seconds=TURN_SECONDS)
    last = 0
    shards = [shard.tokens for entry in manifest.select("train") for shard in entry.shards]
    for start in accumulate(shards[:-1], initial=0):
        store.read(start, 1)
    with raw_reads(reading.root, manifest, reading.length, max(1, max_open // num_folders)) as raw_read:

        def turn() -> tuple[float, float]:
            nonlocal last
            previous = last
            last, _, cpu_seconds = read_for_seconds(samples, turn_reading, previous)
            return cpu_seconds / ((last - previous) * reading.batch), raw_read(TURN_SECONDS / 4)

        yield turn


@contextmanager
def raw_reads(root: Path, manifest: Manifest, length: int, max_open: int) -> Iterator[Callable[[float], float]]:
    """Context manager that yields a function for raw reads only.

    The function takes a duration in processor seconds and returns the processor seconds per sample. It reads as many
    bytes as a sample spans, at random positions of the tars, into one buffer.

    Args:
        root: prepared folder.
        manifest: manifest of the folder.
        length: tokens per sample.
        max_open: maximum number of open tars. If there are more tars, a random selection is read.
    """
    generator = random.Random(0)
    shards = [shard for entry in manifest.select("train") for shard in entry.shards]
    selected = generator.sample(shards, min(len(shards), max_open))
    buffer = memoryview(bytearray(max(shard.bytes for shard in selected)))
    with ExitStack() as stack:
        open_files = []
        for shard in selected:
            open_files.append((os.open(root / shard.file, os.O_RDONLY), shard))
            stack.callback(os.close, open_files[-1][0])

        def read(seconds: float) -> float:
            tokens, started = 0, time.process_time()
            while time.process_time() - started < seconds:
                for _ in range(100):
                    descriptor, shard = generator.choice(open_files)
                    num_tokens = min(length, shard.tokens)
                    size = shard.bytes * num_tokens // shard.tokens
                    os.preadv(descriptor, [buffer[:size]], generator.randrange(shard.bytes - size + 1))
                    tokens += num_tokens
            return (time.process_time() - started) * length / tokens

        yield read
