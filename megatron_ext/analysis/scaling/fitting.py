"""Fit of a scaling law for each mixer, with uncertainty, and its output as numbers, text, figures and files."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations, count
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.analysis.output import replace_files
from megatron_ext.analysis.scaling.isoflop import Budget, PowerLaw, best_sizes, budgets
from megatron_ext.analysis.scaling.law import Fit, check_points, fit
from megatron_ext.analysis.scaling.points import Points
from megatron_ext.analysis.scaling.run_points import RunPoints, as_csv
from megatron_ext.analysis.scaling.transfer import Difference, Line, difference, line_of
from megatron_ext.analysis.scaling.uncertainty import (
    NO_FREEDOM,
    PARAMS_EXPONENT,
    TOKENS_EXPONENT,
    BackTest,
    Uncertainty,
    back_test,
    uncertainty_of,
)
from megatron_ext.analysis.scaling.unidentifiable import CONSTANTS, names_of
from megatron_ext.analysis.style import Picture
from megatron_ext.utils.atomic_files import os_reason
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.markdown import table, write_both

WHY_NOT_FALLING = (
    "an exponent is not above 0: loss does not fall with it, so the law predicts nothing for larger models"
)

INTERVALS = (
    "95 % profile-likelihood intervals, in which the noise of the models' losses about the law varies (their seeds, "
    "batches and evaluated text), not the law's form"
)

WRITTEN = re.compile(r"(scaling|isoflop|test_loss)[A-Za-z0-9_.+-]*\.(png|csv)|points\.csv")
"""Pattern of the file names besides fit.json and fit.md."""

Pair = tuple[str, str, Difference]
"""Names of two mixers, and the difference of their test losses."""


@dataclass(frozen=True)
class Found:
    """Results of one mixer.

    Attributes:
        fitted: the law.
        sure: uncertainty of the law.
        tested: back-test on the largest models; None if there are too few smaller models.
        budgets: IsoFLOP parabolas.
        best: power law of the optimal size over compute; None if fewer than two parabolas have a minimum.
        transfer: power law of test loss over training loss; None if there are too few test losses.
    """

    fitted: Fit
    sure: Uncertainty
    tested: BackTest | None
    budgets: list[Budget]
    best: PowerLaw | None
    transfer: Line | None


@dataclass(frozen=True)
class Options:
    """Options of the fit.

    Attributes:
        drop_highest: number of points with the highest losses to leave out of each mixer.
    """

    drop_highest: int = 0


@dataclass(frozen=True)
class Fitting:
    """Results of all mixers.

    Attributes:
        mixers: results by mixer; the name is empty for points without a mixer.
        apart: differences of each pair of mixers with test losses, in the order of the mixers.
        runs: runs of the points, and runs that were left out; empty for points of a CSV file.
    """

    mixers: Mapping[str, Found]
    apart: Sequence[Pair]
    runs: RunPoints

    @cached_property
    def pictures(self) -> list[Picture]:
        """Figures of each mixer's law and parabolas, and of test loss over training loss."""
        return _pictures(self.mixers)


def fit_all(points: Mapping[str, Points], where: str, options: Options, runs: RunPoints | None = None) -> Fitting:
    """Fit a law for each mixer, and warn on standard error about constants that the points do not determine.

    Args:
        points: points by mixer.
        where: name of the points' source in messages.
        options: options of the fit.
        runs: runs of the points; None: the points are from a CSV file.

    Raises:
        UserError: a law cannot be fitted to the points of a mixer.
    """
    kept = {mixer: _kept(some, options.drop_highest) for mixer, some in points.items()}
    for mixer, some in kept.items():
        check_points(some, _named(where, mixer))
    found = {}
    for mixer, some in kept.items():
        print(f"fitting a law to {len(some)} points{f' of {mixer}' if mixer else ''}", file=sys.stderr, flush=True)
        found[mixer] = _find(some)
    for mixer, one in found.items():
        for line in unknown_of(one):
            print(f"warning: {_named(where, mixer)}: {line}", file=sys.stderr)
    return Fitting(found, _differences(found), RunPoints() if runs is None else runs)


def _named(where: str, mixer: str) -> str:
    return f"{where} ({mixer})" if mixer else where


def write(found: Fitting, output: Path, *, keep: Path | None = None) -> None:
    """Write fit.json, fit.md, figures with their numbers and, for runs, points.csv.

    Other files of an earlier fit are removed.

    Args:
        found: results of the fit.
        output: folder; created if it does not exist.
        keep: a file that must not be removed or overwritten, such as the source of the points.

    Raises:
        UserError: the output cannot be written, or `keep` would be overwritten.
    """
    files = files_of(found)
    if keep is not None and keep.resolve() in {(output / name).resolve() for name in files}:
        raise UserError(str(keep), "would be overwritten by a file of the fit", "give another folder with --output")
    try:
        replace_files(output, files, "fit.json", WRITTEN, keep=keep)
        write_both(output, "fit", {**numbers_of(found), "files": list(files)}, text_of(found))
    except OSError as error:
        hint = "give another folder with --output or free disk space"
        raise UserError(str(output), f"cannot be written ({os_reason(error)})", hint) from None


def _kept(points: Points, dropped: int) -> Points:
    order = np.argsort(points.losses, kind="stable")
    return points.take(np.sort(order[: max(0, len(points) - dropped)]))


def _find(points: Points) -> Found:
    fitted = fit(points)
    of_compute = budgets(points)
    transfer = None if points.test_losses is None else line_of(points.losses, points.test_losses)
    return Found(fitted, uncertainty_of(fitted), back_test(points), of_compute, best_sizes(of_compute), transfer)


def _lines(found: Mapping[str, Found]) -> dict[str, Line]:
    return {mixer: one.transfer for mixer, one in found.items() if one.transfer is not None}


def _differences(found: Mapping[str, Found]) -> list[Pair]:
    """Return the difference of each pair of mixers, in the order of the mixers."""
    return [(a, b, difference(one, other)) for (a, one), (b, other) in combinations(_lines(found).items(), 2)]


def files_of(found: Fitting) -> dict[str, bytes]:
    """Return the files besides fit.json and fit.md: figures with their numbers and, for runs, points.csv."""
    files = {name: content for picture in found.pictures for name, content in picture.files().items()}
    return files | ({"points.csv": as_csv(found.runs).encode()} if found.runs else {})


def _pictures(mixers: Mapping[str, Found]) -> list[Picture]:
    """Build the figures of each mixer's law and parabolas, and of test loss over training loss."""
    from megatron_ext.analysis.scaling.figures import budgets_picture, law_picture, transfer_picture

    made: list[Picture] = []
    for mixer, one in mixers.items():
        taken = {picture.name for picture in made}
        name, title = _free(taken, "scaling", mixer), _title(mixer, "Scaling law")
        made.append(law_picture(name, one.fitted, one.sure, title))
        if one.budgets:
            name, title = _free(taken, "isoflop", mixer), _title(mixer, "IsoFLOP")
            made.append(budgets_picture(name, one.budgets, title))
    if lines := _lines(mixers):
        made.append(transfer_picture("test_loss", lines))
    return made


def _free(taken: Collection[str], kind: str, mixer: str) -> str:
    """Return an unused file name; names of mixers that differ only in punctuation would otherwise collide."""
    plain = f"{kind}_{re.sub(r'[^A-Za-z0-9.+-]+', '_', mixer)}" if mixer else kind
    names = (f"{plain}{f'_{number}' if number > 1 else ''}" for number in count(1))
    return next(name for name in names if name not in taken)


def _title(mixer: str, what: str) -> str:
    return f"{what}: {mixer}" if mixer else what


def numbers_of(found: Fitting) -> dict[str, Any]:
    """Return the contents of fit.json: the numbers of a single unnamed law, or the numbers by mixer."""
    by_mixer = {mixer: _numbers_of(one) for mixer, one in found.mixers.items()}
    if list(by_mixer) == [""]:
        return by_mixer[""]
    pairs = [{"mixer": one, "other": other, **asdict(apart)} for one, other, apart in found.apart]
    left_out = [{"run": str(one.run), "reason": one.reason} for one in found.runs.left_out]
    return {"mixers": by_mixer, "test_loss_differences": pairs, "left_out": left_out}


def _numbers_of(found: Found) -> dict[str, Any]:
    law = found.fitted.law
    return {
        **asdict(law),
        "objective": found.fitted.objective,
        PARAMS_EXPONENT: law.params_exponent if law.falls else None,
        TOKENS_EXPONENT: 1 - law.params_exponent if law.falls else None,
        "intervals": {
            name: _known(found.sure.interval(name)) for name in (*CONSTANTS, PARAMS_EXPONENT, TOKENS_EXPONENT)
        },
        "interval_method": INTERVALS,
        "noise": found.sure.noise,
        "untold": names_of(found.sure.unidentifiable),
        "warnings": warnings_of(found),
        "points": len(found.fitted.points),
        "back_test": _numbers_of_test(found.tested),
        "isoflop": {
            "budgets": [
                {
                    "flops": one.flops,
                    "points": len(one.points),
                    "params": one.best_params,
                    "params_interval": one.best_interval,
                    "tokens": one.best_tokens,
                    "doubt": one.doubt or None,
                }
                for one in found.budgets
            ],
            "params_of_flops": None if found.best is None else asdict(found.best),
        },
        "test_loss": _numbers_of_line(found.transfer),
    }


def _numbers_of_line(line: Line | None) -> dict[str, Any] | None:
    if line is None:
        return None
    return {
        "factor": line.factor,
        "exponent": line.exponent,
        "exponent_interval": list(line.exponent_interval),
        "deviation": line.deviation,
        "points": len(line.rest),
    }


def _known(interval: tuple[float, float]) -> list[float | None] | None:
    """Convert an interval to JSON: None if it is unknown, and None for an unbounded end."""
    return None if math.isnan(interval[0]) else [end if math.isfinite(end) else None for end in interval]


def _numbers_of_test(tested: BackTest | None) -> dict[str, Any] | None:
    if tested is None:
        return None
    errors = np.abs(tested.errors)
    return {
        "law": asdict(tested.law),
        "held_out": len(tested.held_out),
        "smallest_params": float(tested.held_out.params.min()),
        "mean_error": float(errors.mean()),
        "largest_error": float(errors.max()),
        "bias": float(tested.errors.mean()),
    }


def text_of(found: Fitting) -> str:
    """Return the contents of fit.md."""
    lines = [f"L(N, D) = E + A / N^alpha + B / D^beta, nats per token, with {INTERVALS}.", ""]
    columns = ["mixer", "points", *CONSTANTS, "objective"]
    rows = []
    for mixer, one in found.mixers.items():
        cells = [_with_interval(getattr(one.fitted.law, name), one.sure.interval(name)) for name in CONSTANTS]
        rows.append([mixer or "all", str(len(one.fitted.points)), *cells, f"{one.fitted.objective:.5g}"])
    lines += [*table(columns, rows), ""]
    for mixer, one in found.mixers.items():
        for warning in warnings_of(one):
            lines += [f"{_title(mixer, 'Warning')}: {warning}.", ""]
        lines += [f"{_title(mixer, 'Best size')}: {allocation_line(one)}", ""]
        lines += [f"{_title(mixer, 'Back-test')}: {test_line(one.tested)}", ""]
        lines += [f"{_title(mixer, 'IsoFLOP')}: {budget_line(one)}", ""]
        if one.transfer is not None:
            lines += [f"{_title(mixer, 'Test loss')}: {transfer_line(one.transfer)}", ""]
    lines += _difference_lines(found.apart)
    if found.runs.left_out:
        lines += ["Runs that are not used:", "", *(f"- {one}" for one in found.runs.left_out)]
    return "\n".join(lines).rstrip() + "\n"


def warnings_of(found: Found) -> list[str]:
    """Return the warnings about a law, as sentences without the full stop."""
    return [*unknown_of(found), *([] if found.fitted.law.falls else [WHY_NOT_FALLING])]


def unknown_of(found: Found) -> list[str]:
    """Return the reasons why constants have no interval, as sentences without the full stop."""
    return [*map(str, found.sure.unidentifiable), *([NO_FREEDOM] if found.sure.region is None else [])]


def _with_interval(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.5g} ({interval_words(interval, '.3g') or 'unknown'})"


def interval_words(interval: tuple[float, float], form: str) -> str:
    """Format an interval with its bounded ends; empty if it is unknown."""
    low, high = interval
    if math.isnan(low) or (math.isinf(low) and math.isinf(high)):
        return "" if math.isnan(low) else "not bounded"
    if math.isinf(low):
        return f"at most {high:{form}}"
    return f"at least {low:{form}}" if math.isinf(high) else f"{low:{form}} to {high:{form}}"


def allocation_line(found: Found) -> str:
    """Describe the growth of the optimal numbers of parameters and tokens with compute by the law."""
    law = found.fitted.law
    if not law.falls:
        return f"{WHY_NOT_FALLING}."
    ends = [
        interval_words(found.sure.interval(name), ".3f") or "unknown" for name in (PARAMS_EXPONENT, TOKENS_EXPONENT)
    ]
    a = law.params_exponent
    return f"parameters grow as compute^{a:.3f} ({ends[0]}), tokens as compute^{1 - a:.3f} ({ends[1]})."


def test_line(tested: BackTest | None) -> str:
    """Describe a back-test."""
    if tested is None:
        return "without the largest models, too few are left to fit a law."
    errors, n = np.abs(tested.errors), len(tested.held_out)
    smallest = f"{tested.held_out.params.min():.3g}"
    return (
        f"the law without the {n} largest models (from {smallest} parameters on) is off by {100 * errors.mean():.2f} % "
        f"of their loss in the mean, at most {100 * errors.max():.2f} % (bias {100 * tested.errors.mean():+.2f} %)."
    )


def budget_line(found: Found) -> str:
    """Describe the results of the IsoFLOP parabolas."""
    told = [one for one in found.budgets if one.best_params is not None]
    if not found.budgets:
        return "no four sizes have about the same compute."
    doubts = "".join(f" Budget of {one.flops:.3g} FLOPs: {one.doubt}." for one in found.budgets if one.doubt)
    line = f"{len(told)} of {len(found.budgets)} budgets have a lowest loss among their sizes"
    if found.best is None:
        return f"{line}.{doubts}"
    interval = found.best.exponent_interval
    ends = "two budgets: interval unknown" if interval is None else f"{interval_words(interval, '.3f')}, 95 %"
    return f"{line}; the best number of parameters grows as compute^{found.best.exponent:.3f} ({ends}).{doubts}"


def transfer_line(line: Line) -> str:
    """Describe the power law of test loss over training loss."""
    low, high = line.exponent_interval
    return (
        f"{line.factor:.4g} * loss^{line.exponent:.4g} (exponent {low:.3g} to {high:.3g}, 95 %), "
        f"and models {100 * line.deviation:.2f} % about it."
    )


def _difference_lines(differences: Sequence[Pair]) -> list[str]:
    if not differences:
        return []
    columns = ["mixer", "other", "p-value", "at training loss", "other's test loss beside"]
    rows = [[one, other, f"{apart.p_value:.2g}", *apart_cells(apart)] for one, other, apart in differences]
    return [
        "Test loss over training loss, whether two mixers have the same curve (Wald's test, each pair by itself):",
        "",
        *table(columns, rows),
        "",
    ]


def apart_cells(apart: Difference) -> list[str]:
    """Format the middle of the training losses that two mixers share, and the ratio of their test losses there."""
    if apart.train_loss is None or apart.ratio is None or apart.interval is None:
        return ["none in common", "-"]
    low, high = (100 * (x - 1) for x in apart.interval)
    return [f"{apart.train_loss:.4g}", f"{100 * (apart.ratio - 1):+.2f} % ({low:+.2f} to {high:+.2f})"]
