"""Weights & Biases (`pip install 'selectron[wandb]'`). Its own environment variables configure it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from megatron_ext.training.loggers.core.registry import register
from megatron_ext.training.loggers.core.tracker import PROJECT, Point, Tracker, new_id

LOGIN_SECONDS = 30
"""Longest wait for an answer if the library asks for a key on a terminal."""

STEP = "step"
"""Metric that is the x axis of all others. W&B drops values with an earlier step of its own count."""


@register("wandb", package="wandb", install="pip install 'selectron[wandb]'")
class WeightsAndBiases(Tracker):
    """Log to W&B: online, or with WANDB_MODE=offline to files in the run folder that `wandb sync` sends later.

    All W&B runs of a run form a group of its name.
    """

    service = "wandb"
    _run: Any = None

    def begin(self, run_id: str | None) -> str:
        """Create or resume a W&B run. It begins with the configuration as `config`."""
        import wandb

        run_id = run_id or new_id()
        self._run = wandb.init(
            id=run_id,
            resume="allow",
            name=None if "WANDB_NAME" in os.environ else self.run.name,
            group=None if "WANDB_RUN_GROUP" in os.environ else self.run.name,
            project=None if "WANDB_PROJECT" in os.environ else PROJECT,
            dir=None if "WANDB_DIR" in os.environ else str(self.run.folder),
            config=dict(self.run.settings),
            allow_val_change=True,
            settings=wandb.Settings(
                console="off",
                login_timeout=LOGIN_SECONDS,
                silent=True,
                x_disable_meta=True,  # it would send the command line, which may contain credentials
                disable_git=True,  # and the URL of the repository
            ),
        )
        self._run.define_metric("*", step_metric=STEP)
        if self._run.url:  # None offline
            tqdm.write(f"wandb: {self._run.url}", file=sys.stderr)
        return run_id

    def send(self, points: Sequence[Point]) -> None:
        """Log each point as a row of the W&B run's history, with its step."""
        for point in points:
            self._run.log({**point.metrics, STEP: point.step})

    def finish(self, *, finished: bool) -> None:
        """Send what is buffered and end the W&B run."""
        self._run.finish()
