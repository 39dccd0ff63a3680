"""Reading time of a sample by number of shards, measured in alternation.

The rows of a table are measured minutes apart, while a machine's speed drifts.
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
from megatron_ext.bench.loader.run import SEED, Reading, at_once, timed
from megatron_ext.data.opening import shard_files
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.data.shards import TokenStore, open_shards

TURN = 0.1
"""Seconds of sample reading per turn, at least hundreds of samples; a quarter of it in addition for raw reads."""


def measure_turns(roots: Mapping[Path, int], length: int, batch: int, ranks: int, seconds: float) -> list[Turns]:
    """Read several folders in alternation, with several concurrent processes.

    Args:
        roots: prepared folders, with the number of shards of their training text.
        length: tokens per sample.
        batch: samples per micro-batch.
        ranks: number of processes.
        seconds: duration per folder.
    """
    for root in roots:
        for path in shard_files(root):
            for _ in range(2):  # so that the kernel's cost of a page's second read is not measured
                path.read_bytes()
    readings = [[Reading(root, length, batch, rank, ranks, seconds) for root in roots] for rank in range(ranks)]
    found = at_once(take_turns, readings)
    return [
        Turns(shards, length, ranks, *zip(*(spent for rank in found for spent in rank[number]), strict=True))
        for number, shards in enumerate(roots.values())
    ]


def take_turns(readings: Sequence[Reading]) -> list[list[tuple[float, float]]]:
    """Return processor seconds per sample, and of raw reads, in one process: by folder, round after round.

    Args:
        readings: one per folder, otherwise equal.
    """
    rounds = 2 * math.ceil(readings[0].seconds / TURN / 2)  # an equal number in each order
    with ExitStack() as stack:
        folders = [stack.enter_context(_folder(reading, len(readings))) for reading in readings]
        spent: list[list[tuple[float, float]]] = [[] for _ in folders]
        for number in range(-1, rounds):
            for place in range(len(folders))[:: 1 if number % 2 else -1]:
                turn = folders[place]()
                if number >= 0:  # the first round is warm-up
                    spent[place].append(turn)
    return spent


@contextmanager
def _folder(reading: Reading, of: int) -> Iterator[Callable[[], tuple[float, float]]]:
    """Context manager that yields a function which reads one turn in a folder with open shards; see `take_turns`."""
    # In training a store may use a quarter of the process's files. Four such stores would leave none for raw reads.
    most = open_shards()
    manifest = load_manifest(reading.root)
    store = TokenStore(reading.root, manifest, "train", most_open=max(1, min(most, 3 * most // of)))
    samples, short, last = TrainingSamples(store, reading.length, SEED), replace(reading, seconds=TURN), 0
    shards = [shard.tokens for entry in manifest.select("train") for shard in entry.shards]
    for start in accumulate(shards[:-1], initial=0):
        store.read(start, 1)
    with bare_reads(reading.root, manifest, reading.length, max(1, most // of)) as bare:

        def turn() -> tuple[float, float]:
            nonlocal last
            before = last
            last, _, work = timed(samples, short, before)
            return work / ((last - before) * reading.batch), bare(TURN / 4)

        yield turn


@contextmanager
def bare_reads(root: Path, manifest: Manifest, length: int, most_open: int) -> Iterator[Callable[[float], float]]:
    """Context manager that yields a function for raw reads only.

    The function takes a number of processor seconds and returns those per sample. It reads as many bytes as a sample
    spans, at random positions of the tars, into one buffer.

    Args:
        root: prepared folder.
        manifest: of the folder.
        length: tokens per sample.
        most_open: maximum number of open tars; if there are more, a random selection.
    """
    chance = random.Random(0)
    shards = [shard for entry in manifest.select("train") for shard in entry.shards]
    chosen = chance.sample(shards, min(len(shards), most_open))
    buffer = memoryview(bytearray(max(shard.bytes for shard in chosen)))
    with ExitStack() as stack:
        opened = []
        for shard in chosen:
            opened.append((os.open(root / shard.file, os.O_RDONLY), shard))
            stack.callback(os.close, opened[-1][0])

        def read(seconds: float) -> float:
            tokens, started = 0, time.process_time()
            while time.process_time() - started < seconds:
                for _ in range(100):
                    descriptor, shard = chance.choice(opened)
                    part = min(length, shard.tokens)
                    size = shard.bytes * part // shard.tokens
                    os.preadv(descriptor, [buffer[:size]], chance.randrange(shard.bytes - size + 1))
                    tokens += part
            return (time.process_time() - started) * length / tokens

        yield read
