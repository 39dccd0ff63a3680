"""Base class of loggers, and the conversion of a run's records to tags and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.run_folder.layout import EVALUATION, METRICS

DATA = "data"
"""Field of a record with the first digits of a digest of the text that the record refers to."""

_NON_SCALAR_FIELDS = ("step", DATA)


@dataclass(frozen=True)
class LoggedRun:
    """Run whose metrics are logged.

    Attributes:
        folder: run folder.
        name: `run.name`.
        steps: optimizer steps of the whole run.
        texts: value of the field `DATA` in each record, by file name (METRICS, EVALUATION).
        settings: configuration and model size as plain values by dotted field, without credentials.
    """

    folder: Path
    name: str
    steps: int
    texts: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """Point from which a run is logged.

    Attributes:
        step: number of completed steps.
        history: yields the records of these steps, as (file name, record), file by file.
        records: number of records in `history`.
        has_dropped: True if records of later steps existed. These steps will be repeated.
    """

    step: int
    history: Callable[[], Iterator[tuple[str, dict[str, Any]]]]
    records: int
    has_dropped: bool


class Logger(ABC):
    """Destination of a run's metrics. Only the first rank of a run has loggers.

    A subclass registers itself (see `registry.register`) and imports an optional package in `start` or later. An
    `OSError` ends the run with a message about the run folder.

    Args:
        run: the run that is logged.
    """

    def __init__(self, run: LoggedRun) -> None:
        self.run = run

    @abstractmethod
    def start(self, start: Start) -> None:
        """Begin to log, or begin again after the run rolled back. Later steps that were logged before are repeated."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log values of a step.

        Args:
            metrics: values by tag, such as `train/loss`, `validation/Web` or `retrieval/passkey/1024`.
            step: number of the optimizer step. It never decreases between two calls of `start`, and may repeat with
                other tags.
        """

    def record(self, name: str, record: Mapping[str, Any]) -> None:
        """Log a record of a step, an evaluation or a suite. By default its values are passed to `log`.

        Args:
            name: file that the record belongs to: METRICS, EVALUATION or SUITES.
            record: fields by name.
        """
        self.log(scalars(name, record), int(record["step"]))

    def flush(self) -> None:  # noqa: B027 (optional)
        """Write what is buffered. Called before a checkpoint is saved."""

    def close(self) -> None:  # noqa: B027 (optional)
        """Write what is buffered and release all resources. Called once, also if the run failed."""


def scalars(name: str, record: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a record by tag.

    Args:
        name: file that the record belongs to: METRICS, EVALUATION or SUITES.
        record: fields by name.
    """
    if name == METRICS:
        values = {key: value for key, value in record.items() if key not in _NON_SCALAR_FIELDS and value is not None}
        return {f"train/{key}": value for key, value in values.items()}
    if name == EVALUATION:
        return {f"{record['split']}/{record['domain']}": record["loss"]}
    return {f"{record['suite']}/{score}": value for score, value in record["scores"].items()}
