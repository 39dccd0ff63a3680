"""Runs as points of a scaling law."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_ext.analysis.run_texts import text_warnings
from megatron_ext.analysis.runs import CONFIG, Run, read_runs
from megatron_ext.analysis.scaling.points import MIXER, NUMBERS, TEST_LOSS, Points
from megatron_ext.analysis.scaling.pooled import OF_LAW, law_names
from megatron_ext.errors import UserError
from megatron_ext.reports import csv_row

METRICS = "metrics.jsonl"
_LONGEST_LINE = 1 << 24

WINDOW = 0.05
"""Share of a run's steps, at its end, over which its training loss is averaged: that of one step is that of a batch."""

LONGEST_WINDOW = 100
"""Steps: over more of them the loss falls."""


@dataclass(frozen=True)
class RunPoint:
    """A finished run.

    Attributes:
        run: its folder.
        mixer: what its law is called: its layers, and of which recipe it is where runs differ; see `law_names`.
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


@dataclass(frozen=True)
class LeftOut:
    """A run that is no point.

    Attributes:
        run: its folder.
        reason: why.
    """

    run: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.run}: {self.reason}"


class RunPoints(list[RunPoint]):
    """Points of runs.

    Args:
        points: of those that are finished.
        left_out: the others.

    Attributes:
        left_out: the others.
    """

    def __init__(self, points: Iterable[RunPoint] = (), left_out: Sequence[LeftOut] = ()) -> None:
        super().__init__(points)
        self.left_out = list(left_out)


def points_of_runs(paths: Sequence[Path], *, embeddings: bool = True) -> RunPoints:
    """A point for each finished run.

    Args:
        paths: run folders, or folders of run folders; of these, runs that are not finished are left out, with a
            warning on standard error.
        embeddings: whether embeddings and the output layer count as parameters.

    Raises:
        UserError: a folder is no run's or damaged, a run that is named itself is not finished, or none is; a run did
            not keep the number of its parameters, or is over other data than the first.
    """
    folders, without_steps = _begun(paths)
    if not folders:
        raise _none_finished(without_steps)
    _warn(without_steps)
    points = points_of(read_runs(folders, evaluated=False), paths, embeddings=embeddings)
    return RunPoints(points, [*without_steps, *points.left_out])


def points_of(runs: Sequence[Run], named: Sequence[Path] = (), *, embeddings: bool = True) -> RunPoints:
    """The same of runs that are read already.

    Args:
        runs: the runs.
        named: folders that were asked for: a run whose own folder is among them must be finished.
        embeddings: as above.

    Raises:
        UserError: a run that is named is not finished, or none is; or a run did not keep the number of its parameters.
    """
    reasons = {run.path: reason for run in runs if (reason := _unfinished(run))}
    asked = {path.resolve() for path in named}
    for path, reason in reasons.items():
        if path.resolve() in asked:
            raise UserError(str(path), reason, "finish it with --resume, or leave it out")
    left_out = [LeftOut(path, reason) for path, reason in reasons.items()]
    if len(left_out) == len(runs):
        raise _none_finished(left_out)
    _warn(left_out)
    finished = [run for run in runs if run.path not in reasons]
    names = law_names(finished)
    for line in (*text_warnings(finished), *_separate(names)):
        print(f"warning: {line}", file=sys.stderr)
    points = [_point(run, name, embeddings) for run, name in zip(finished, names, strict=True)]
    missing = [point for point in points if point.test_loss is None]
    if missing and len(missing) < len(points):
        print(f"warning: {missing[0].run}: no test loss after the last step: none is fitted", file=sys.stderr)
    return RunPoints(points, left_out)


def _begun(paths: Sequence[Path]) -> tuple[list[Path], list[LeftOut]]:
    """Folders of runs, and those in a folder of runs that have no step yet, which cannot be read."""
    folders: list[Path] = []
    left_out: list[LeftOut] = []
    for path in paths:
        runs = [] if (path / CONFIG).exists() or not path.is_dir() else sorted(path.iterdir())
        runs = [run for run in runs if (run / CONFIG).exists()]
        without = [run for run in runs if not _has_a_step(run / METRICS)]
        left_out += [LeftOut(run, "has no step yet") for run in without]
        folders += [run for run in runs if run not in without] or ([] if runs else [path])
    return folders, left_out


def _has_a_step(metrics: Path) -> bool:
    """Whether there is a whole line: a killed run may have left a part of one."""
    if not metrics.is_file():
        return False
    with metrics.open("rb") as file:
        return file.readline(_LONGEST_LINE).endswith(b"\n")


def _unfinished(run: Run) -> str:
    """Why a run is no point; empty: it is one."""
    steps, last = int(run.config["training"]["steps"]), int(run.steps[-1])
    return "" if last == steps else f"stopped at step {last} of {steps}"


def _none_finished(left_out: Sequence[LeftOut]) -> UserError:
    first, more = left_out[0], len(left_out) - 1
    problem = first.reason + (f", and none of the {more} others is finished" if more else "")
    return UserError(str(first.run), problem, "finish some with --resume")


def _warn(left_out: Sequence[LeftOut]) -> None:
    for one in left_out:
        print(f"warning: {one}: it is left out of the fit", file=sys.stderr)


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
        last = [repr(point.test_loss)] if tested else []
        writer.writerow(csv_row([*numbers, point.mixer, *last, point.run]))
    return stream.getvalue()


def _tested(points: Sequence[RunPoint]) -> bool:
    return all(point.test_loss is not None for point in points)


def _separate(names: Sequence[str]) -> list[str]:
    """What is said where the runs of one mixer are not of one law."""
    laws: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        laws.setdefault(name.partition(OF_LAW)[0], []).append(name)
    return [
        f"the runs of {mixer} are not all of one recipe, and a law is fitted to each: {'; '.join(some)}"
        for mixer, some in laws.items()
        if len(some) > 1
    ]


def _point(run: Run, name: str, embeddings: bool) -> RunPoint:
    last = int(run.steps[-1])
    if run.size is None:
        mend = "give a CSV file with the column params instead"
        raise UserError(str(run.path / "model.json"), "is missing: the number of parameters is not known", mend)
    params = run.size.parameters
    if not embeddings:
        params -= run.size.embedding_parameters + run.size.output_layer_parameters
    window = min(max(1, round(WINDOW * last)), LONGEST_WINDOW)
    loss = float(run.losses[run.steps > last - window].mean())
    return RunPoint(run.path, name, params, int(run.tokens[-1]), loss, _test_loss(run))


def _test_loss(run: Run) -> float | None:
    domains = run.split("test")
    if not domains or run.evaluation_steps[-1] != run.steps[-1]:
        return None
    return float(sum(d.losses[-1].sum() for d in domains) / sum(d.tokens.sum() for d in domains))
