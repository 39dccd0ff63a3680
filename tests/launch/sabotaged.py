"""Replacement of `python` that runs the command with faults in training, see `rank_server`.

Each start of a run holds its first rank once there is a new checkpoint, until a drill releases it or asks it to stop.
Every fault therefore meets the run in a step after that checkpoint, however slow the machine is.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from megatron_ext.cli import main

if TYPE_CHECKING:
    from megatron_ext.training.loop import TrainingLoop
    from megatron_ext.training.resilience.stopping import StopRequest

CHECKPOINT_EVERY = 2
NAN_ONCE = "nan_once"
"""Fault: a gradient of rank 1 is NaN in one attempt of a step."""
STUCK_ONCE = "stuck_once"
"""Fault: the first rank ignores a request to stop while it is held, in the start after the first requeue."""


class FaultyStart:
    """Hold and faults of this start of a run, with a replacement of `TrainingLoop._attempt`.

    Args:
        attempt: the original method.
        faults: names of the faults.
    """

    def __init__(self, attempt: Callable[..., Any], faults: Sequence[str]) -> None:
        self._attempt, self._faults = attempt, faults
        self._attempts = 0
        self._due: int | None = None  # this start is held once there is a checkpoint of this step or a later one

    def attempt(self, loop: TrainingLoop, batches: Any, stop: StopRequest, *arguments: Any) -> Any:
        """Hold the first rank if it is time, and attempt a step."""
        newest = loop.store.folder.latest()
        if self._due is None:
            # The first fault of a run may damage its newest checkpoint, so there must be two.
            self._due = 2 * CHECKPOINT_EVERY if newest is None else newest + 1
            if NAN_ONCE in self._faults:
                next(iter(loop.trainer.optimizer.chunks[0].parameters())).register_hook(self._broken)
        self._attempts += 1
        if os.environ["RANK"] == "0" and (newest or 0) >= self._due:
            is_stuck = STUCK_ONCE in self._faults and restarts() == 1
            _hold(loop.store.folder.root.parent, lambda: stop.signal_name is not None and not is_stuck)
            self._due = loop.training.steps + 1  # a start is held once
        return self._attempt(loop, batches, stop, *arguments)

    def _broken(self, gradient: Any) -> Any:
        """Make a gradient of rank 1 NaN in the third attempt of the first start, before this start is held."""
        is_due = os.environ["RANK"] == "1" and self._attempts == 3 and not restarts()
        return gradient * math.nan if is_due else gradient


def holding_file(run: Path) -> Path:
    """File that exists while the first rank of a run is held. Removing it releases the rank."""
    return run.with_name(f"{run.name}.held")


def _never_held_file(run: Path) -> Path:
    """File that exists if no start of a run is to be held any more."""
    return run.with_name(f"{run.name}.never_held")


def stop_holding(run: Path) -> None:
    """Release a run, and let its later starts train without being held."""
    _never_held_file(run).touch()
    holding_file(run).unlink(missing_ok=True)


def _hold(run: Path, is_released: Callable[[], bool]) -> None:
    held, never_held = holding_file(run), _never_held_file(run)
    if not never_held.exists():
        held.touch()
    while held.exists() and not never_held.exists() and not is_released():
        time.sleep(0.1)
    held.unlink(missing_ok=True)


def restarts() -> int:
    """Return how often Slurm has requeued the job."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0))


def run(arguments: Sequence[str]) -> int:
    """Run `FAULTS -m megatron_ext.cli COMMAND ...` as a process of its own does. Return its exit code."""
    from megatron_ext.training.loop import TrainingLoop

    faults, *module = arguments[:3]
    assert module == ["-m", "megatron_ext.cli"]
    sys.argv[:] = ["selectron", *arguments[3:]]
    start = FaultyStart(TrainingLoop._attempt, faults.split(","))
    with patch.object(TrainingLoop, "_attempt", lambda *arguments: start.attempt(*arguments)):
        return main()
