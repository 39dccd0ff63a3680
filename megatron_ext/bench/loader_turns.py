"""What a sample takes by number of shards, read in turns: rows lie minutes apart, and a machine's speed drifts."""

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
from megatron_ext.bench.loader import SEED, Reading, at_once, timed
from megatron_ext.bench.loader_report import Turns
from megatron_ext.data.opening import shard_files
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.data.shards import TokenStore, open_shards

TURN = 0.1
"""Seconds of samples in a turn, hundreds at the least; reads alone have a quarter of it behind them."""


def measure_turns(roots: Mapping[Path, int], length: int, batch: int, ranks: int, seconds: float) -> list[Turns]:
    """Read several folders in turn, with several processes at once.

    Args:
        roots: prepared folders, and how many shards the training text of each is in.
        length: tokens a sample.
        batch: samples a micro-batch.
        ranks: processes.
        seconds: how long samples of each folder are read.
    """
    for root in roots:
        for path in shard_files(root):
            for _ in range(2):  # what a page's second reading costs the system is not the samples'
                path.read_bytes()
    readings = [[Reading(root, length, batch, rank, ranks, seconds) for root in roots] for rank in range(ranks)]
    found = at_once(take_turns, readings)
    return [
        Turns(shards, length, ranks, *zip(*(spent for rank in found for spent in rank[number]), strict=True))
        for number, shards in enumerate(roots.values())
    ]


def take_turns(readings: Sequence[Reading]) -> list[list[tuple[float, float]]]:
    """Processor seconds a sample, and of reads alone, in one process: by folder, round after round.

    Args:
        readings: one a folder, alike but for that.
    """
    rounds = 2 * math.ceil(readings[0].seconds / TURN / 2)  # as many one way round as the other
    with ExitStack() as stack:
        folders = [stack.enter_context(_folder(reading, len(readings))) for reading in readings]
        spent: list[list[tuple[float, float]]] = [[] for _ in folders]
        for number in range(-1, rounds):
            for place in range(len(folders))[:: 1 if number % 2 else -1]:
                turn = folders[place]()
                if number >= 0:  # in the first, memory is touched for the first time
                    spent[place].append(turn)
    return spent


@contextmanager
def _folder(reading: Reading, of: int) -> Iterator[Callable[[], tuple[float, float]]]:
    """Give what reads on for a turn in a folder whose shards are open, one of several: see `take_turns`."""
    # A store may have a quarter of the process's files, as in training; four of them would leave none for reads alone.
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
    """Give what reads for so many processor seconds, nothing else, and says how many a sample took.

    As many bytes as a sample spans, at random places of the tars, into one buffer.

    Args:
        root: a prepared folder.
        manifest: what is in it.
        length: tokens a sample.
        most_open: tars that are held open; random ones, where there are more.
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
