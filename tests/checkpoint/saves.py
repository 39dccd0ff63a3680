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
        self.config, self.trainer, plain = resharded.begun(
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


@contextmanager
def before_item(act: Callable[[], None]) -> Iterator[None]:
    """Context manager in which the background writer calls `act` before it writes an item."""
    write_item = saving._write_item

    def acting(*args: Any) -> Any:
        act()
        return write_item(*args)

    with patch.object(saving, "_write_item", acting):
        yield


def train_on(rank: int, world_size: int, root: Path, sharding: str) -> tuple[State, State, list[Any]]:
    """Save after each of four steps, with writing blocked until the model has trained one more step.

    Returns:
        The whole state at the last save, the whole state after the next step, and for each save the exchanges used for
        planning and whether any part of the checkpoint was visible before writing was released.
    """
    run, told = Run(root, sharding=sharding), []
    run.train()
    for _ in range(4):
        at_save, let_go = resharded.whole(run.trainer), Event()
        run.store.wait()
        with before_item(let_go.wait), counted_exchanges() as exchanges:
            run.save()
            planning = len(exchanges)
            step = run.step
            run.train()
            told.append((planning, run.store.is_busy, run.store.folder.path(step).exists()))
            let_go.set()
            run.store.wait()
    return at_save, resharded.whole(run.trainer), told


@contextmanager
def counted_exchanges() -> Iterator[list[str]]:
    """Context manager that records the exchanges of objects between ranks."""
    calls: list[str] = []
    names = ("all_gather_object", "gather_object", "scatter_object_list")
    originals = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Any:
        return lambda *args, **more: (calls.append(name), originals[name](*args, **more))[1]

    with patch.multiple(dist, **{name: counting(name) for name in names}):
        yield calls


def save_at_once(rank: int, world_size: int, root: Path, steps: int, sharding: str) -> None:
    """Save the same run once, synchronously."""
    run = Run(root, asynchronous=False, sharding=sharding)
    for _ in range(steps):
        run.train()
    run.save()
    assert not run.store.is_busy


def read(rank: int, world_size: int, root: Path, step: int) -> tuple[State, Progress]:
    """Load a checkpoint into a model with other weights. Return the state and the recorded progress."""
    _, trainer, store = resharded.begun(resharded.Run(root, "attention", {}), seed=2)
    record = store.check(step)
    store.load(trainer.optimizer, record)
    return resharded.whole(trainer), record.progress


def poll(rank: int, world_size: int, root: Path) -> list[tuple[int, list[int]]]:
    """Poll background saves as the training loop does. Rank 1 is slower by two polls.

    Returns:
        After each poll, the newest checkpoint (0 if there is none) and all checkpoints.
    """
    run, told = Run(root, retention=Retention(newest=1)), []
    let_go = Event()
    with before_item(let_go.wait if rank == 1 else lambda: None):
        run.train()
        run.save()
        for number in range(4):
            if number == 2:
                let_go.set()
            if number >= 2 or rank == 0:
                run.store._saving._writing.result()  # type: ignore[union-attr]
                if run.store._saving._finishing is not None:  # type: ignore[union-attr]
                    run.store._saving._finishing.result()  # type: ignore[union-attr]
            busy = torch.tensor([float(run.store.is_busy)])
            dist.all_reduce(busy, op=dist.ReduceOp.MAX)
            if not busy:
                run.store.advance()
            told.append((run.store.folder.latest() or 0, run.store.folder.steps(), run.store._saving is None))
            dist.barrier()
    return told


def fail(rank: int, world_size: int, root: Path, error: Exception) -> tuple[list[str], list[str], list[int]]:
    """Save; fail on rank 1 while saving again; save a third time.

    Returns:
        The error of the failing save, its remaining files, and the checkpoints at the end.
    """
    run, said = Run(root), []

    def failing() -> None:
        if rank == 1:
            raise error

    for failing_now in (False, True, False):
        run.train()
        try:
            with before_item(failing if failing_now else lambda: None):
                run.save()
                run.store.wait()
        except Exception as raised:
            said.append(f"{type(raised).__name__}: {raised}")
            left = sorted(path.name for path in root.iterdir())
    return said, left, run.store.folder.steps()


def disk_that_forgets(rank: int, world_size: int, root: Path) -> str:
    """Save to a disk that returns a flipped bit. Return the error."""
    run, check = Run(root), saving._check

    def forgetting(path: Path, written: Any) -> None:
        if path.name == "__1_0.distcp":
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        check(path, written)

    run.train()
    with patch.object(saving, "_check", forgetting):
        run.save()
        try:
            run.store.wait()
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"
    return "nothing"


def abandon(rank: int, world_size: int, root: Path) -> tuple[list[str], int | None]:
    """Save, start another save, and abandon it. Return the remaining files and the newest checkpoint."""
    run, let_go = Run(root), Event()
    run.train()
    run.save()
    run.store.wait()
    with before_item(lambda: let_go.wait(5.0)):
        run.train()
        run.save()
        run.store._saving._abandoned.set()  # type: ignore[union-attr]
        let_go.set()
        run.store.abandon()
    dist.barrier()
    assert not run.store.is_busy
    return sorted(path.name for path in root.iterdir()), run.store.folder.latest()


def take_its_time(rank: int, world_size: int, root: Path) -> tuple[list[int], list[str]]:
    """Start saves whose background thread would begin in an hour. Wait for two of the saves and abandon one.

    Returns:
        The number of checkpoints before each wait or abandonment, and the content of the folder at the end.
    """
    run, there = Run(root), []
    with patch.object(saving, "HEAD_START", 3600.0):
        for end in (run.store.wait, run.store.wait, run.store.abandon):
            run.train()
            run.save()
            there.append(len(run.store.folder.steps()))
            end()
    dist.barrier()
    return there, sorted(path.name for path in root.iterdir())


def be_killed(rank: int, world_size: int, root: Path) -> None:
    """Save. Then kill rank 1 in the middle of a file of the next save."""
    run, items = Run(root), []
    run.train()
    run.save()
    run.store.wait()
    run.train()

    def die() -> None:
        items.append(1)
        if rank == 1 and len(items) > 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with before_item(die):
        run.save()
        run.store.wait()


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
