"""Functions run by each rank in tests that need a whole run, inside an existing process group."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from held import held_near_its_end

from megatron_ext.config.load import load_config
from megatron_ext.config.rules import check
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.run_folder.layout import METRICS
from megatron_ext.training.run import train
from megatron_ext.training.starting import Resume, run_folder


def resume(rank: int, world_size: int, path: Path, overrides: list[str], mode: Resume = True) -> str:
    """Resume as `selectron train --resume` or `--resume=auto` does. Return what the rank wrote to standard error."""
    with redirect_stderr(StringIO()) as errors:
        run(rank, world_size, path, overrides, resume=mode)
    return errors.getvalue()


def run_from_step(rank: int, world_size: int, path: Path, overrides: list[str], step: int) -> None:
    """Resume as `selectron train --from-step` does."""
    run(rank, world_size, path, overrides, from_step=step)


def run_with_signals(
    rank: int, world_size: int, path: Path, overrides: list[str], step: int, signals: dict[int, int], errors: Path
) -> None:
    """Train as each process of `selectron train` does, and send signals to ranks.

    If a rank is to stop (SIGSTOP), the watchdog measures only the time since then, so that it ends no rank that is slow
    for another reason.

    Args:
        rank: rank of this process.
        world_size: number of processes.
        path: configuration.
        overrides: overrides of its fields.
        step: number of recorded steps after which the signals are sent, wherever the run then is.
        signals: number of the signal by rank; other ranks get none.
        errors: file that receives the standard error of the first rank, that of C++ code included. The process ids of
            ranks to be stopped are written beside it.
    """
    if rank == 0:
        with errors.open("wb") as file:
            os.dup2(file.fileno(), 2)  # never restored, because this call ends the process
    if signal.SIGSTOP in signals.values():
        stopped = next(other for other, number in signals.items() if number == signal.SIGSTOP)
        _delay_watchdog(errors.with_name(f"pid_{stopped}"), is_stopped=rank == stopped)
    if rank not in signals:
        return run(rank, world_size, path, overrides)
    metrics = run_folder(load_config(path, overrides, load_all())) / METRICS
    threading.Thread(target=_send_after, args=(signals[rank], metrics, step), daemon=True).start()
    with held_near_its_end():
        return run(rank, world_size, path, overrides)


def _send_after(number: int, metrics: Path, step: int) -> None:
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < step:
        time.sleep(0.005)
    os.kill(os.getpid(), number)


def _delay_watchdog(pid_file: Path, *, is_stopped: bool) -> None:
    """Start the watchdog's timer only once the process in a file is stopped.

    Args:
        pid_file: file that the process writes here.
        is_stopped: whether this is the process that will be stopped.
    """
    start, timers, peer_stopped = faulthandler.dump_traceback_later, list[tuple[Any, ...]](), threading.Event()

    def start_later(*arguments: Any, **named: Any) -> None:
        timers.append((arguments, named))
        if peer_stopped.is_set():
            start(*arguments, **named)

    faulthandler.dump_traceback_later = start_later
    if is_stopped:
        pid_file.with_suffix(".new").write_text(str(os.getpid()))
        pid_file.with_suffix(".new").rename(pid_file)
        return

    def wait() -> None:
        while not pid_file.exists() or psutil.Process(int(pid_file.read_text())).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        peer_stopped.set()
        arguments, named = timers[-1]
        start(*arguments, **named)

    threading.Thread(target=wait, daemon=True).start()


def run(
    rank: int, world_size: int, path: Path, overrides: list[str], resume: Resume = False, from_step: int | None = None
) -> None:
    """Train as each process of `selectron train` does."""
    mixers = load_all()
    config = load_config(path, overrides, mixers)
    check(config, world_size, mixers)
    with patch("torch.distributed.destroy_process_group"):  # the group belongs to the pool
        train(config, resume=resume, from_step=from_step)
