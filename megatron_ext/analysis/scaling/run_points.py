"""Runs as points of a scaling law."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_ext.analysis.architecture import mixer_label
from megatron_ext.analysis.runs import Run, read_runs
from megatron_ext.analysis.scaling.points import MIXER, NUMBERS, TEST_LOSS, Points
from megatron_ext.errors import UserError

WINDOW = 0.05
"""Share of a run's steps, at its end, over which its training loss is averaged: that of one step is that of a batch."""

LONGEST_WINDOW = 100
"""Steps: over more of them the loss falls."""


@dataclass(frozen=True)
class RunPoint:
    """A finished run.

    Attributes:
        run: its folder.
        mixer: what its layers are, see `mixer_label`.
        params: parameters.
        tokens: training tokens.
        loss: training loss in nats a token, mean over the last steps.
        test_loss: in nats a token of all out-of-domain documents, after the last step; None: not evaluated then.
    """

    run: Path
    mixer: str
    params: int
    tokens: int
    loss: float
    test_loss: float | None


def points_of_runs(paths: Sequence[Path], *, embeddings: bool = True) -> list[RunPoint]:
    """A point for each run.

    Args:
        paths: run folders, or folders of run folders.
        embeddings: whether embeddings and the output layer count as parameters.

    Raises:
        UserError: a folder is no run's or damaged, a run is not finished, did not keep the number of its parameters,
            or is over other data than the first.
    """
    points = [_point(run, embeddings) for run in read_runs(paths, evaluated=False)]
    missing = [point for point in points if point.test_loss is None]
    if missing and len(missing) < len(points):
        print(f"warning: {missing[0].run}: no test loss after the last step: none is fitted", file=sys.stderr)
    return points


def by_mixer(points: Sequence[RunPoint]) -> dict[str, Points]:
    """Points by mixer, in the order in which they first appear; with test losses where all runs have them."""
    tested = _tested(points)
    found: dict[str, list[list[float]]] = {}
    for point in points:
        values = [point.params, point.tokens, point.loss]
        found.setdefault(point.mixer, []).append([*values, point.test_loss] if tested else values)  # type: ignore[list-item]
    return {mixer: Points(*np.array(values, dtype=np.float64).T) for mixer, values in found.items()}


def as_csv(points: Sequence[RunPoint]) -> str:
    """The points as a CSV file that can be fitted again, with the runs they are of."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    tested = _tested(points)
    writer.writerow([*NUMBERS, MIXER, *([TEST_LOSS] if tested else []), "run"])
    for point in points:
        numbers = [point.params, point.tokens, repr(point.loss)]
        writer.writerow([*numbers, point.mixer, *([repr(point.test_loss)] if tested else []), point.run])
    return stream.getvalue()


def _tested(points: Sequence[RunPoint]) -> bool:
    return all(point.test_loss is not None for point in points)


def _point(run: Run, embeddings: bool) -> RunPoint:
    steps = int(run.config["training"]["steps"])
    last = int(run.steps[-1])
    if last != steps:
        mend = "finish it with --resume, or leave it out"
        raise UserError(str(run.path), f"stopped at step {last} of {steps}", mend)
    if run.size is None:
        mend = "give a CSV file with the column params instead"
        raise UserError(str(run.path / "model.json"), "is missing: the number of parameters is not known", mend)
    params = run.size.parameters
    if not embeddings:
        params -= run.size.embedding_parameters + run.size.output_layer_parameters
    window = min(max(1, round(WINDOW * last)), LONGEST_WINDOW)
    loss = float(run.losses[run.steps > last - window].mean())
    return RunPoint(run.path, mixer_label(run), params, int(run.tokens[-1]), loss, _test_loss(run))


def _test_loss(run: Run) -> float | None:
    domains = run.split("test")
    if not domains or run.evaluation_steps[-1] != run.steps[-1]:
        return None
    return float(sum(d.losses[-1].sum() for d in domains) / sum(d.tokens.sum() for d in domains))
