"""Conversion of runs to points of a scaling law."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from megatron_ext.analysis.choices import choose_runs, chosen_fields
from megatron_ext.analysis.run_files import SPLITS
from megatron_ext.analysis.run_texts import text_warnings
from megatron_ext.analysis.runs import Run, read_runs
from megatron_ext.analysis.scaling.points import DOMAIN_LOSS, MIXER, REQUIRED_COLUMNS, TEST_LOSS, Points
from megatron_ext.analysis.scaling.pooled import LAW_SEPARATOR, law_names
from megatron_ext.run_folder.layout import CONFIG, METRICS, MODEL
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.markdown import csv_row

_MAX_LINE_BYTES = 1 << 24

WINDOW_FRACTION = 0.05
"""Final fraction of a run's steps over which its training loss is averaged, because the loss of one batch is noisy."""

MAX_WINDOW = 100
"""Maximum averaging window in steps. Over a longer window the loss would fall noticeably."""


@dataclass(frozen=True)
class RunPoint:
    """Point of a finished run.

    Attributes:
        run: run folder.
        mixer: name of the law that the run belongs to; see `law_names`.
        params: number of parameters.
        tokens: number of training tokens.
        loss: training loss in nats per token, mean over the last steps.
        test_loss: loss on all out-of-domain documents after the last step, in nats per token; None: not evaluated
            after the last step.
        domain_losses: the same for each domain with test documents, by name and split; empty: not evaluated then.
    """

    run: Path
    mixer: str
    params: int
    tokens: int
    loss: float
    test_loss: float | None
    domain_losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ExcludedRun:
    """Run that is excluded from the fit.

    Attributes:
        run: run folder.
        reason: reason for the exclusion.
    """

    run: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.run}: {self.reason}"


class RunPoints(list[RunPoint]):
    """List of the points of finished runs.

    Args:
        points: points of finished runs.
        excluded: runs that are excluded from the fit.

    Attributes:
        excluded: runs that are excluded from the fit.
    """

    def __init__(self, points: Iterable[RunPoint] = (), excluded: Sequence[ExcludedRun] = ()) -> None:
        super().__init__(points)
        self.excluded = list(excluded)


def read_run_points(paths: Sequence[Path], *, embeddings: bool = True) -> RunPoints:
    """Read run folders and return a point for each finished run.

    Args:
        paths: run folders, or folders of run folders. Unfinished runs inside a folder of runs are left out, with a
            warning on standard error.
        embeddings: True to count the parameters of embeddings and output layer.

    Raises:
        UserError: a folder is not a valid run folder, a run folder that is given directly is unfinished, no run is
            finished, a run has no recorded number of parameters, or runs are on different data.
    """
    folders, without_steps = _started_runs(paths)
    if not folders:
        raise _none_finished(without_steps)
    _warn(without_steps)
    points = run_points(read_runs(folders, evaluated=False), paths, embeddings=embeddings)
    return RunPoints(points, [*without_steps, *points.excluded])


def run_points(runs: Sequence[Run], given: Sequence[Path] = (), *, embeddings: bool = True) -> RunPoints:
    """Return a point for each finished run.

    Of runs in a sweep that chooses fields by validation loss, only those with the best values are used.

    Args:
        runs: the runs.
        given: folders given by the user. A run whose own folder is among them must be finished.
        embeddings: whether to count the parameters of embeddings and output layer.

    Raises:
        UserError: a run of `given` is unfinished, no run is finished, a run has no recorded number of parameters, or
            the best values cannot be chosen (see `choose_runs`).
    """
    reasons = {run.path: reason for run in runs if (reason := _unfinished_reason(run))}
    resolved = {path.resolve() for path in given}
    for path, reason in reasons.items():
        if path.resolve() in resolved:
            raise UserError(str(path), reason, "finish it with --resume, or remove it")
    excluded = [ExcludedRun(path, reason) for path, reason in reasons.items()]
    if len(excluded) == len(runs):
        raise _none_finished(excluded)
    _warn(excluded)
    finished = [run for run in runs if run.path not in reasons]
    chosen = chosen_fields(finished)
    choices = choose_runs(finished, chosen)
    used = {run.path for run in choices.runs}
    reason = f"another {', '.join(chosen)} has a lower validation loss"
    excluded += [ExcludedRun(run.path, reason) for run in finished if run.path not in used]
    names = law_names(choices.runs, chosen)
    for line in (*choices.warnings, *text_warnings(choices.runs), *_law_warnings(names)):
        print(f"warning: {line}", file=sys.stderr)
    points = [_point(run, name, embeddings) for run, name in zip(choices.runs, names, strict=True)]
    missing = [point for point in points if point.test_loss is None]
    if missing and len(missing) < len(points):
        print(
            f"warning: {missing[0].run} has no test loss after its last step: test losses are not fitted",
            file=sys.stderr,
        )
    return RunPoints(points, excluded)


def _started_runs(paths: Sequence[Path]) -> tuple[list[Path], list[ExcludedRun]]:
    """Return the run folders to read, and the runs without a step inside given folders of runs, which are excluded."""
    folders: list[Path] = []
    excluded: list[ExcludedRun] = []
    for path in paths:
        runs = [] if (path / CONFIG).exists() or not path.is_dir() else sorted(path.iterdir())
        runs = [run for run in runs if (run / CONFIG).exists()]
        unstarted = [run for run in runs if not _has_a_step(run / METRICS)]
        excluded += [ExcludedRun(run, "has no step yet") for run in unstarted]
        folders += [run for run in runs if run not in unstarted] or ([] if runs else [path])
    return folders, excluded


def _has_a_step(metrics: Path) -> bool:
    """Return True if the file has a complete line. A killed run may have left only a partial line."""
    if not metrics.is_file():
        return False
    with metrics.open("rb") as file:
        return file.readline(_MAX_LINE_BYTES).endswith(b"\n")


def _unfinished_reason(run: Run) -> str:
    """Return the reason why a run is unfinished; empty if it is finished."""
    steps, last = int(run.config["training"]["steps"]), int(run.steps[-1])
    return "" if last == steps else f"stopped at step {last} of {steps}"


def _none_finished(excluded: Sequence[ExcludedRun]) -> UserError:
    first, more = excluded[0], len(excluded) - 1
    problem = first.reason + (f", and none of the {more} others is finished" if more else "")
    return UserError(str(first.run), problem, "resume some of them with --resume")


def _warn(excluded: Sequence[ExcludedRun]) -> None:
    for run in excluded:
        print(f"warning: {run}: it is not used in the fit", file=sys.stderr)


def by_mixer(points: Sequence[RunPoint]) -> dict[str, Points]:
    """Group points by mixer, in the order of first occurrence. Test losses are included only if all points have one."""
    has_test_losses = _has_test_losses(points)
    members: dict[str, list[RunPoint]] = {}
    for point in points:
        members.setdefault(point.mixer, []).append(point)
    return {mixer: _to_points(own, has_test_losses) for mixer, own in members.items()}


def _to_points(own: Sequence[RunPoint], has_test_losses: bool) -> Points:
    values = np.array([(point.params, point.tokens, point.loss) for point in own], dtype=np.float64)
    points = Points(*values.T)
    if not has_test_losses:
        return points
    domains = {domain: np.array([point.domain_losses[domain] for point in own]) for domain in own[0].domain_losses}
    test_losses = np.array([point.test_loss for point in own], dtype=np.float64)
    return replace(points, test_losses=test_losses, domain_losses=domains)


def as_csv(points: Sequence[RunPoint]) -> str:
    """Return the points as a CSV file in the format of `read_points`, with a column for the run."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    domains = list(points[0].domain_losses) if _has_test_losses(points) else []
    test_columns = [TEST_LOSS, *(DOMAIN_LOSS + domain for domain in domains)] if _has_test_losses(points) else []
    writer.writerow([*REQUIRED_COLUMNS, MIXER, *test_columns, "run"])
    for point in points:
        numbers = [point.params, point.tokens, repr(point.loss)]
        test_losses = [point.test_loss, *(point.domain_losses[domain] for domain in domains)] if test_columns else []
        writer.writerow(csv_row([*numbers, point.mixer, *map(repr, test_losses), point.run]))
    return stream.getvalue()


def _has_test_losses(points: Sequence[RunPoint]) -> bool:
    return all(point.test_loss is not None for point in points)


def _law_warnings(names: Sequence[str]) -> list[str]:
    """Return a warning for each mixer whose runs belong to several laws."""
    laws: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        laws.setdefault(name.partition(LAW_SEPARATOR)[0], []).append(name)
    return [
        f"the runs of {mixer} have different settings, and each group gets a law of its own: {'; '.join(laws_of_mixer)}"
        for mixer, laws_of_mixer in laws.items()
        if len(laws_of_mixer) > 1
    ]


def _point(run: Run, name: str, embeddings: bool) -> RunPoint:
    last = int(run.steps[-1])
    if run.size is None:
        hint = "give a CSV file with the column params instead"
        raise UserError(str(run.path / MODEL), "is missing: the number of parameters is unknown", hint)
    params = run.size.parameters
    if not embeddings:
        params -= run.size.embedding_parameters + run.size.output_layer_parameters
    window = min(max(1, round(WINDOW_FRACTION * last)), MAX_WINDOW)
    loss = float(run.losses[run.steps > last - window].mean())
    return RunPoint(run.path, name, params, int(run.tokens[-1]), loss, run.final_loss("test"), _domain_losses(run))


def _domain_losses(run: Run) -> dict[str, float]:
    """Return the loss on each domain with test documents after the last step; empty if it was not evaluated then."""
    if not run.is_evaluated_at_end:
        return {}
    domains = [domain for domain in run.domains if domain.split != "validation"]
    return {f"{d.domain} ({SPLITS[d.split]})": float(d.losses[-1].sum() / d.tokens.sum()) for d in domains}
