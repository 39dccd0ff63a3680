"""Functions run by each rank in `test_checkpoint_saving.py`: saves that are delayed, fail or are killed."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import parity
import resharded
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.checkpoint import saving
from megatron_ext.checkpoint.folder import Progress, Retention
from megatron_ext.checkpoint.store import CheckpointStore

State = dict[str, dict[str, Tensor]]


class Run:
    """Model that is trained step by step, and a store that saves it in the background."""

    def __init__(
        self,
        root: Path,
        *,
        asynchronous: bool = True,
        retention: Retention | None = None,
        sharding: str = "megatron",
    ) -> None:
        self.config, self.trainer, plain = resharded.build(
            resharded.Run(root, "attention", {}, fields={"sharding": sharding}), seed=1
        )
        groups, platform = self.trainer.groups, self.trainer.platform
        self.store = CheckpointStore(root, {}, groups, platform, retention, asynchronous=asynchronous)
        self.plain, self.step = plain, 0

    @property
    def progress(self) -> Progress:
        return Progress(self.step, 8 * self.step, 256 * self.step)

    def train(self) -> None:
        self.trainer.train_step(parity.step_batches(self.config, self.trainer.groups, self.step))
        self.step += 1

    def save(self) -> None:
        self.store.save(self.trainer.optimizer, self.progress)

    def save_synchronously(self, root: Path) -> None:
        store = CheckpointStore(root, {}, self.trainer.groups, self.trainer.platform)
        store.save(self.trainer.optimizer, self.progress)
        assert not store.is_busy


@contextmanager
def call_before_item(callback: Callable[[], None]) -> Iterator[None]:
    """Context manager in which the background writer calls `callback` before it writes an item."""
    write_item = saving._write_item

    def write_with_callback(*args: Any) -> Any:
        callback()
        return write_item(*args)

    with patch.object(saving, "_write_item", write_with_callback):
        yield


def train_during_save(
    rank: int, world_size: int, root: Path, synchronous: Path, sharding: str
) -> tuple[State, State, list[Any]]:
    """Save after each of four steps, with writing blocked until the model has trained one more step.

    The last of these states is also saved to `synchronous`, without training meanwhile.

    Returns:
        The whole state at the last save, the whole state after the next step, and for each save the exchanges used for
        planning and whether any part of the checkpoint was visible before writing was released.
    """
    run, observed = Run(root, sharding=sharding), []
    run.train()
    for _ in range(4):
        at_save, release = resharded.full_state(run.trainer), Event()
        run.store.wait()
        if run.step == 4:
            run.save_synchronously(synchronous)
        with call_before_item(release.wait), record_exchanges() as exchanges:
            run.save()
            planning = len(exchanges)
            step = run.step
            run.train()
            observed.append((planning, run.store.is_busy, run.store.folder.path(step).exists()))
            release.set()
            run.store.wait()
    return at_save, resharded.full_state(run.trainer), observed


@contextmanager
def record_exchanges() -> Iterator[list[str]]:
    """Context manager that records the exchanges of objects between ranks."""
    calls: list[str] = []
    names = ("all_gather_object", "gather_object", "scatter_object_list")
    originals = {name: getattr(dist, name) for name in names}

    def recording(name: str) -> Any:
        return lambda *args, **more: (calls.append(name), originals[name](*args, **more))[1]

    with patch.multiple(dist, **{name: recording(name) for name in names}):
        yield calls


def load(rank: int, world_size: int, root: Path, step: int) -> tuple[State, Progress]:
    """Load a checkpoint into a model with other weights. Return the state and the recorded progress."""
    _, trainer, store = resharded.build(resharded.Run(root, "attention", {}), seed=2)
    record = store.check(step)
    store.load(trainer.optimizer, record)
    return resharded.full_state(trainer), record.progress


def poll(rank: int, world_size: int, root: Path) -> list[tuple[int, list[int]]]:
    """Poll background saves as the training loop does. Rank 1 is slower by two polls.

    Returns:
        After each poll, the newest checkpoint (0 if there is none) and all checkpoints.
    """
    run, observed = Run(root, retention=Retention(newest=1)), []
    release = Event()
    with call_before_item(release.wait if rank == 1 else lambda: None):
        run.train()
        run.save()
        for number in range(4):
            if number == 2:
                release.set()
            if number >= 2 or rank == 0:
                run.store._saving._writing.result()  # type: ignore[union-attr]
                if run.store._saving._finishing is not None:  # type: ignore[union-attr]
                    run.store._saving._finishing.result()  # type: ignore[union-attr]
            busy = torch.tensor([float(run.store.is_busy)])
            dist.all_reduce(busy, op=dist.ReduceOp.MAX)
            if not busy:
                run.store.advance()
            observed.append((run.store.folder.latest() or 0, run.store.folder.steps(), run.store._saving is None))
            dist.barrier()
    return observed


def fail(rank: int, world_size: int, root: Path, error: Exception) -> tuple[list[str], list[str], list[int]]:
    """Save; fail on rank 1 while saving again; save a third time.

    Returns:
        The error of the failing save, its remaining files, and the checkpoints at the end.
    """
    run, messages = Run(root), []

    def raise_on_rank_1() -> None:
        if rank == 1:
            raise error

    for fails in (False, True, False):
        run.train()
        try:
            with call_before_item(raise_on_rank_1 if fails else lambda: None):
                run.save()
                run.store.wait()
        except Exception as raised:
            messages.append(f"{type(raised).__name__}: {raised}")
            files = sorted(path.name for path in root.iterdir())
    return messages, files, run.store.folder.steps()


def save_to_corrupting_disk(rank: int, world_size: int, root: Path) -> str:
    """Save to a disk that returns a flipped bit. Return the error."""
    run, verify_file = Run(root), saving._verify_file

    def corrupt_and_check(path: Path, written: Any) -> None:
        if path.name == "__1_0.distcp":
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        verify_file(path, written)

    run.train()
    with patch.object(saving, "_verify_file", corrupt_and_check):
        run.save()
        try:
            run.store.wait()
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"
    return "no error"


def abandon(rank: int, world_size: int, root: Path) -> tuple[list[str], int | None]:
    """Save, start another save, and abandon it. Return the remaining files and the newest checkpoint."""
    run, release = Run(root), Event()
    run.train()
    run.save()
    run.store.wait()
    with call_before_item(lambda: release.wait(5.0)):
        run.train()
        run.save()
        run.store._saving._abandoned.set()  # type: ignore[union-attr]
        release.set()
        run.store.abandon()
    dist.barrier()
    assert not run.store.is_busy
    return sorted(path.name for path in root.iterdir()), run.store.folder.latest()


def save_with_long_delay(rank: int, world_size: int, root: Path) -> tuple[list[int], list[str]]:
    """Start saves whose background thread would begin in an hour. Wait for two of the saves and abandon one.

    Returns:
        The number of checkpoints before each wait or abandonment, and the content of the folder at the end.
    """
    run, counts = Run(root), []
    with patch.object(saving, "START_DELAY", 3600.0):
        for end_save in (run.store.wait, run.store.wait, run.store.abandon):
            run.train()
            run.save()
            counts.append(len(run.store.folder.steps()))
            end_save()
    dist.barrier()
    return counts, sorted(path.name for path in root.iterdir())


def kill_while_saving(rank: int, world_size: int, root: Path) -> None:
    """Save. Then kill rank 1 in the middle of a file of the next save."""
    run, items = Run(root), []
    run.train()
    run.save()
    run.store.wait()
    run.train()

    def kill_rank_1() -> None:
        items.append(1)
        if rank == 1 and len(items) > 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with call_before_item(kill_rank_1):
        run.save()
        run.store.wait()


DISK_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
