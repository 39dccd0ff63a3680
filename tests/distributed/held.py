"""Command `selectron` whose training waits near its end until a signal: `python held.py train ...`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

from megatron_ext.cli import main

if TYPE_CHECKING:
    from megatron_ext.training.loop import TrainingLoop
    from megatron_ext.training.resilience.stopping import StopRequest


@contextmanager
def held_near_its_end() -> Iterator[None]:
    """Context manager in which training waits before its last step but one until a signal stops or ends it.

    However late the signal is, it meets an unfinished run.
    """
    from megatron_ext.training.loop import TrainingLoop

    step = TrainingLoop._step

    def held(loop: TrainingLoop, stop: StopRequest) -> bool:
        while loop.progress.step >= loop.training.steps - 2 and stop.signal_name is None:
            time.sleep(0.01)
        return step(loop, stop)

    with patch.object(TrainingLoop, "_step", held):
        yield


def _rank_command(subcommand: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, __file__, subcommand, *arguments]


def _main() -> int:
    if "RANK" in os.environ:
        with held_near_its_end():
            return main()
    with patch("megatron_ext.launch.local.rank_command", _rank_command):
        return main()


if __name__ == "__main__":
    sys.exit(_main())
