"""What a checkpoint costs: how long training stands still for it, and how fast it is written and read."""

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
from megatron_ext.files import force_to_disk
from megatron_ext.platform import Platform

WARM_UP = 2
"""Steps before any is timed, and saves: both are planned by all ranks together."""

_BLOCK = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save in the background.

    Attributes:
        stall: seconds in which the step that follows had not begun, at the save and where it was brought forward.
        steps: seconds of each training step until the checkpoint was whole.
        whole_after: seconds from the save until it was.
    """

    stall: float
    steps: list[float]
    whole_after: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds, on the first rank, and bytes, of all ranks.

    Attributes:
        parameters: of the model part of the first rank.
        size: bytes of a checkpoint.
        step: a training step, nothing being saved; median.
        first: the first save, which is planned.
        saves: those from the third on.
        at_once: a save that training waits for; median.
        floor_write: the same bytes in as many plain files at once, forced to the disk.
        check: reading every file and comparing its checksum, nothing of it being in memory.
        load: reading the state after that.
        floor_read: the plain files, nothing of them being in memory. This and the last three: medians.
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


class Bench:
    """A run of random tokens, and its checkpoints. Every method is a collective call.

    Args:
        config: of the run.
        vocabulary: tokens of the model.
        groups: process groups.
        platform: where this runs.
        root: folder for checkpoints and plain files; on the disk that is measured.
    """

    def __init__(
        self, config: RunConfig, vocabulary: int, groups: ProcessGroupCollection, platform: Platform, root: Path
    ) -> None:
        self._groups, self._platform, self._root = groups, platform, root
        self._run = TimedRun(config, vocabulary, groups, platform)
        self._timed = self._run.timed

    def measure(self, steps: int, saves: int) -> Measured:
        """All there is to know, in one run.

        Args:
            steps: timed without a save.
            saves: timed of each kind.
        """
        for _ in range(WARM_UP):
            self._timed(self._run.train)
        plain = median([self._timed(self._run.train) for _ in range(steps)])
        later = self._store(asynchronous=True)
        first, *warm = [self._save(later) for _ in range(WARM_UP + saves)]
        at_once = self._store(asynchronous=False)
        whole = [self._timed(partial(self._save_at_once, at_once)) for _ in range(WARM_UP + saves)][WARM_UP:]
        folder = at_once.folder.path(self._run.step)
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        # All of the disk in turn, so that what else uses it meets all alike.
        reads = [(*self._load(at_once, folder), *self._plain_files(sizes)) for _ in range(saves)]
        check, load, floor_write, floor_read = (median(seconds) for seconds in zip(*reads, strict=True))
        return Measured(
            parameters=sum(p.numel() for chunk in self._run.trainer.optimizer.chunks for p in chunk.parameters()),
            size=sum(sizes.values()),
            step=plain,
            first=first,
            saves=warm[WARM_UP - 1 :],
            at_once=median(whole),
            floor_write=floor_write,
            check=check,
            load=load,
            floor_read=floor_read,
        )

    def _store(self, *, asynchronous: bool) -> CheckpointStore:
        root = self._root / ("later" if asynchronous else "at_once")
        return CheckpointStore(root, {}, self._groups, self._platform, Retention(newest=1), asynchronous=asynchronous)

    def _save(self, store: CheckpointStore) -> Save:
        """As the training loop does: after each step, all ranks ask whether one is still at work."""
        started = time.perf_counter()
        stall = self._timed(lambda: store.save(self._run.trainer.optimizer, Progress(self._run.step)))
        steps = []
        while store.is_saving:
            steps.append(self._timed(self._run.train))
            busy = torch.tensor(float(store.is_busy), device=self._platform.device)
            dist.all_reduce(busy, op=dist.ReduceOp.MAX)
            if not busy:
                stall += self._timed(store.advance)
        return Save(stall=stall, steps=steps, whole_after=time.perf_counter() - started)

    def _save_at_once(self, store: CheckpointStore) -> None:
        self._run.step += 1  # a checkpoint's name
        store.save(self._run.trainer.optimizer, Progress(self._run.step))

    def _load(self, store: CheckpointStore, folder: Path) -> tuple[float, float]:
        found: list[Any] = []
        self._forget(folder)
        check = self._timed(lambda: found.append(store.check(self._run.step)))
        self._forget(folder)
        return check, self._timed(lambda: store.load(self._run.trainer.optimizer, found[0]))

    def _plain_files(self, sizes: dict[str, int]) -> tuple[float, float]:
        """This rank's files again, as plain ones: seconds to write and to read those of all ranks."""
        folder, own = self._root / "plain", f"__{dist.get_rank()}_"
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{own}*"):
            old.unlink()
        files = {folder / name: size for name, size in sizes.items() if name.startswith(own)}
        block = memoryview(np.random.default_rng(0).bytes(_BLOCK))
        with ThreadPoolExecutor(FILES_PER_RANK) as threads:
            write = self._timed(lambda: list(threads.map(lambda path: _write(path, files[path], block), files)))
            self._forget(folder)
            read = self._timed(lambda: list(threads.map(_read, files)))
        return write, read

    def _forget(self, folder: Path) -> None:
        """Have the operating system forget what it keeps of files in memory."""
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
    force_to_disk(path)


def _read(path: Path) -> None:
    buffer = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
