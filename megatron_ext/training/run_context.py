"""Settings and environment of one start of a run, before any component is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_ext.config.schema import RunConfig
from megatron_ext.platform.device import Platform
from megatron_ext.run_folder.lock import RunLock
from megatron_ext.training.branch import Branch


@dataclass(frozen=True)
class RunContext:
    """Settings and environment of one start of a run.

    Attributes:
        config: checked configuration with derived fields.
        folder: run folder.
        platform: platform of this process.
        lock: lock of the run folder; None except on the first rank.
        step: step of the run's own checkpoint to continue from; None: start from the beginning or from `branch`.
        is_exact: True if an earlier checkpoint must not be used when the checkpoint of `step` is damaged.
        branch: checkpoint of another run to start from, or None.
    """

    config: RunConfig
    folder: Path
    platform: Platform
    lock: RunLock | None = None
    step: int | None = None
    is_exact: bool = False
    branch: Branch | None = None
