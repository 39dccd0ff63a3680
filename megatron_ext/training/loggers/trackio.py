"""Trackio (`pip install 'selectron[trackio]'`). Its own environment variables configure it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ext.training.loggers.core.registry import register
from megatron_ext.training.loggers.core.tracker import PROJECT, Point, Tracker, new_id


@register("trackio", package="trackio", install="pip install 'selectron[trackio]'")
class Trackio(Tracker):
    """Log to Trackio's local folder (TRACKIO_DIR), a Space (TRACKIO_SPACE_ID) or a server (TRACKIO_SERVER_URL).

    Trackio resumes runs by name, so a run's name there is `run.name` with a random suffix. The group is `run.name`.
    """

    service = "trackio"
    _run: Any = None

    def begin(self, run_id: str | None) -> str:
        """Create or resume a Trackio run. A new one gets the configuration as `config`."""
        import trackio

        name = run_id or f"{self.run.name}-{new_id()}"
        self._run = trackio.init(
            project=PROJECT,
            name=name,
            group=self.run.name,
            config=dict(self.run.settings),
            resume="must" if run_id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return name

    def send(self, points: Sequence[Point]) -> None:
        """Log each point with its step."""
        for point in points:
            self._run.log(dict(point.metrics), step=point.step)

    def finish(self, *, finished: bool) -> None:
        """Send what is buffered and end the Trackio run."""
        self._run.finish()
