"""MLflow (`pip install 'selectron[mlflow]'`). Its own environment variables configure it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_ext.run_folder.layout import MLFLOW
from megatron_ext.training.loggers.core.registry import register
from megatron_ext.training.loggers.core.tracker import PROJECT, Point, Tracker

_INVALID_CHARACTERS = re.compile(r"[^\w\-. :/]", re.ASCII)
"""Characters that MLflow does not allow in names of metrics and parameters."""

METRICS_PER_CALL, PARAMS_PER_CALL, PARAM_LENGTH = 1000, 100, 6000
"""Limits of MLflow's REST interface."""


@register("mlflow", package="mlflow", install="pip install 'selectron[mlflow]'")
class MLflow(Tracker):
    """Log to the server of MLFLOW_TRACKING_URI, or without it to a SQLite file in the run folder.

    Characters of a tag that MLflow does not allow are replaced by `_`.
    """

    service = "mlflow"
    _client: Any = None
    _run_id = ""

    def begin(self, run_id: str | None) -> str:
        """Create or reopen an MLflow run. Only a new one gets the configuration, as parameters cannot be changed."""
        from mlflow import MlflowClient

        uri = None if "MLFLOW_TRACKING_URI" in os.environ else f"sqlite:///{(self.run.folder / MLFLOW).absolute()}"
        self._client = MlflowClient(tracking_uri=uri)
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self._run_id = run_id
            return run_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._run_id = str(self._client.create_run(number, run_name=self.run.name).info.run_id)
        self._send_params()
        return self._run_id

    def _send_params(self) -> None:
        from mlflow.entities import Param

        params = [Param(_valid_name(key), str(value)[:PARAM_LENGTH]) for key, value in self.run.settings.items()]
        for batch in _batches(params, PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=batch)

    def send(self, points: Sequence[Point]) -> None:
        """Log the values with their steps and the present time."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(_valid_name(tag), value, now, point.step) for point in points for tag, value in point.metrics.items()
        ]
        for batch in _batches(metrics, METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=batch)

    def finish(self, *, finished: bool) -> None:
        """Set the state of the MLflow run: FINISHED, or KILLED if steps are left."""
        self._client.set_terminated(self._run_id, "FINISHED" if finished else "KILLED")


def _valid_name(tag: str) -> str:
    return _INVALID_CHARACTERS.sub("_", tag)


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[first : first + size] for first in range(0, len(items), size))
