"""Benchmark of checkpoints: stall of training, and throughput of writing and reading."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.bench.steps import TimedRun
from megatron_ext.checkpoint.folder import Progress, Retention
from megatron_ext.checkpoint.plan import FILES_PER_RANK
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.config.schema import RunConfig
from megatron_ext.platform.device import Platform
from megatron_ext.utils.atomic_files import fsync_path

WARM_UP_STEPS = 2
"""Number of untimed steps at the start, and of untimed saves: in the first saves all ranks plan together."""

_BLOCK_SIZE = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Save:
    """Measurements of an asynchronous save.

    Attributes:
        stall: seconds in which training waited, at the save and at the calls of `advance`.
        steps: seconds of each training step until the checkpoint was complete.
        whole_after: seconds from the save until the checkpoint was complete.
    """

    stall: float
    steps: list[float]
    whole_after: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of a run. Times are in seconds on the first rank.

    Attributes:
        parameters: number of parameters of the first rank's model shard.
        size: bytes of a checkpoint, over all ranks.
        step: a training step without a save in progress; median.
        first: the first save, which includes planning.
        saves: saves from the third on.
        at_once: a synchronous save; median.
        floor_write: writing plain files of the same sizes concurrently, with fsync; median.
        check: reading every file without page cache and comparing its checksum; median.
        load: reading the state after `check`, again without page cache; median.
        floor_read: reading the plain files without page cache; median.
    """

    parameters: int
    size: int
    step: float
    first: Save
    saves: list[Save]
    at_once: float
    floor_write: float
    check: float
    load: float
    floor_read: float


class CheckpointBenchmark:
    """Run on random tokens, and its checkpoints. Every method is a collective call.

    Args:
        config: of the run.
        vocabulary: vocabulary size of the model.
        groups: process groups.
        platform: of this process.
        root: folder for checkpoints and plain files, on the disk to measure.
    """

    def __init__(
        self, config: RunConfig, vocabulary: int, groups: ProcessGroupCollection, platform: Platform, root: Path
    ) -> None:
        self._groups, self._platform, self._root = groups, platform, root
        self._run = TimedRun(config, vocabulary, groups, platform)
        self._time_call = self._run.time_call

    def measure(self, steps: int, saves: int) -> Measured:
        """Do all measurements in one run.

        Args:
            steps: number of timed steps without a save.
            saves: number of timed saves of each kind.
        """
        for _ in range(WARM_UP_STEPS):
            self._time_call(self._run.train)
        step_seconds = median([self._time_call(self._run.train) for _ in range(steps)])
        asynchronous_store = self._store(asynchronous=True)
        first, *later = [self._save(asynchronous_store) for _ in range(WARM_UP_STEPS + saves)]
        synchronous_store = self._store(asynchronous=False)
        save_synchronously = partial(self._save_synchronously, synchronous_store)
        synchronous = [self._time_call(save_synchronously) for _ in range(WARM_UP_STEPS + saves)][WARM_UP_STEPS:]
        folder = synchronous_store.folder.path(self._run.step)
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        # Alternate the disk accesses, so that other load on the disk affects all of them alike.
        reads = [(*self._load(synchronous_store, folder), *self._plain_files(sizes)) for _ in range(saves)]
        check, load, floor_write, floor_read = (median(seconds) for seconds in zip(*reads, strict=True))
        return Measured(
            parameters=sum(p.numel() for chunk in self._run.trainer.optimizer.chunks for p in chunk.parameters()),
            size=sum(sizes.values()),
            step=step_seconds,
            first=first,
            saves=later[WARM_UP_STEPS - 1 :],
            at_once=median(synchronous),
            floor_write=floor_write,
            check=check,
            load=load,
            floor_read=floor_read,
        )

    def _store(self, *, asynchronous: bool) -> CheckpointStore:
        root = self._root / ("later" if asynchronous else "at_once")
        return CheckpointStore(root, {}, self._groups, self._platform, Retention(newest=1), asynchronous=asynchronous)

    def _save(self, store: CheckpointStore) -> Save:
        """Save as the training loop does: after each step, all ranks agree whether any of them is still writing."""
        started = time.perf_counter()
        stall = self._time_call(lambda: store.save(self._run.trainer.optimizer, Progress(self._run.step)))
        steps = []
        while store.is_saving:
            steps.append(self._time_call(self._run.train))
            num_busy = torch.tensor(float(store.is_busy), device=self._platform.device)
            dist.all_reduce(num_busy, op=dist.ReduceOp.MAX)
            if not num_busy:
                stall += self._time_call(store.advance)
        return Save(stall=stall, steps=steps, whole_after=time.perf_counter() - started)

    def _save_synchronously(self, store: CheckpointStore) -> None:
        self._run.step += 1  # the checkpoint is named for it
        store.save(self._run.trainer.optimizer, Progress(self._run.step))

    def _load(self, store: CheckpointStore, folder: Path) -> tuple[float, float]:
        checked: list[Any] = []
        self._drop_page_cache(folder)
        check = self._time_call(lambda: checked.append(store.check(self._run.step)))
        self._drop_page_cache(folder)
        return check, self._time_call(lambda: store.load(self._run.trainer.optimizer, checked[0]))

    def _plain_files(self, sizes: dict[str, int]) -> tuple[float, float]:
        """Write and read this rank's files as plain files; return the seconds of both, over all ranks."""
        folder, prefix = self._root / "plain", f"__{dist.get_rank()}_"
        folder.mkdir(parents=True, exist_ok=True)
        for old_file in folder.glob(f"{prefix}*"):
            old_file.unlink()
        files = {folder / name: size for name, size in sizes.items() if name.startswith(prefix)}
        block = memoryview(np.random.default_rng(0).bytes(_BLOCK_SIZE))
        with ThreadPoolExecutor(FILES_PER_RANK) as threads:
            write = self._time_call(lambda: list(threads.map(lambda path: _write(path, files[path], block), files)))
            self._drop_page_cache(folder)
            read = self._time_call(lambda: list(threads.map(_read, files)))
        return write, read

    def _drop_page_cache(self, folder: Path) -> None:
        """Drop the files of a folder from the page cache."""
        dist.barrier()
        for path in folder.iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        dist.barrier()


def _write(path: Path, size: int, block: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        while size > 0:
            size -= file.write(block[: min(size, len(block))])
    fsync_path(path)


def _read(path: Path) -> None:
    buffer = memoryview(bytearray(_BLOCK_SIZE))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
