"""Output of fitted scaling laws: fit.json, fit.md, and the other files of the output folder."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.analysis.output import replace_files
from megatron_ext.analysis.scaling.fitting import NOT_FALLING, DomainDifference, MixerFit, MixerPair, ScalingFit, title
from megatron_ext.analysis.scaling.isoflop import Budget
from megatron_ext.analysis.scaling.run_points import as_csv
from megatron_ext.analysis.scaling.transfer import Difference, Line
from megatron_ext.analysis.scaling.uncertainty import PARAMS_EXPONENT, TOKENS_EXPONENT, BackTest
from megatron_ext.analysis.scaling.unidentifiable import CONSTANTS, undetermined_names
from megatron_ext.utils.atomic_files import os_error_reason
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.markdown import table, write_report

INTERVALS = (
    "95 % profile-likelihood intervals, in which the noise of the models' losses about the law varies (their seeds, "
    "batches and evaluated text), not the law's form"
)

SIGNIFICANCE = 0.05
"""Significance level of the difference of two mixers' test losses."""

FILE_NAMES = re.compile(r"(scaling|isoflop|test_loss)[A-Za-z0-9_.+-]*\.(png|csv)|points\.csv")
"""Pattern of the file names besides fit.json and fit.md."""


def write_fit(result: ScalingFit, output: Path, *, keep: Path | None = None) -> None:
    """Write fit.json, fit.md, figures with their numbers and, for runs, points.csv.

    Other files of an earlier fit are removed.

    Args:
        result: results of the fit.
        output: folder; created if it does not exist.
        keep: a file that must not be removed or overwritten, such as the source of the points.

    Raises:
        UserError: the output cannot be written, or `keep` would be overwritten.
    """
    files = render_files(result)
    if keep is not None and keep.resolve() in {(output / name).resolve() for name in files}:
        raise UserError(str(keep), "would be overwritten by a file of the fit", "give another folder with --output")
    try:
        replace_files(output, files, "fit.json", FILE_NAMES, keep=keep)
        write_report(output, "fit", {**to_dict(result), "files": list(files)}, format_markdown(result))
    except OSError as error:
        hint = "give another folder with --output or free disk space"
        raise UserError(str(output), f"cannot be written ({os_error_reason(error)})", hint) from None


def render_files(result: ScalingFit) -> dict[str, bytes]:
    """Return the files besides fit.json and fit.md: figures with their numbers and, for runs, points.csv."""
    files = {name: content for picture in result.pictures for name, content in picture.files().items()}
    return files | ({"points.csv": as_csv(result.runs).encode()} if result.runs else {})


# --- fit.json --------------------------------------------------------------------------------------------------------


def to_dict(result: ScalingFit) -> dict[str, Any]:
    """Return the contents of fit.json: the results of a single unnamed law, or the results by mixer."""
    by_mixer = {mixer: _mixer_to_dict(own) for mixer, own in result.mixers.items()}
    if list(by_mixer) == [""]:
        return by_mixer[""]
    pairs = [{"mixer": first, "other": second, **asdict(pair)} for first, second, pair in result.differences]
    left_out = [{"run": str(run.run), "reason": run.reason} for run in result.runs.excluded]
    domain_pairs = [
        {"domain": d.domain, "mixer": d.pair[0], "other": d.pair[1], **asdict(d.pair[2])}
        | {"adjusted_p_value": d.adjusted_p_value}
        for d in result.domain_differences
    ]
    differences = {"test_loss_differences": pairs, "domain_loss_differences": domain_pairs}
    return {"mixers": by_mixer, **differences, "left_out": left_out}


def _mixer_to_dict(result: MixerFit) -> dict[str, Any]:
    law, uncertainty = result.fitted.law, result.uncertainty
    names = (*CONSTANTS, PARAMS_EXPONENT, TOKENS_EXPONENT)
    return {
        **asdict(law),
        "objective": result.fitted.objective,
        PARAMS_EXPONENT: law.params_exponent if law.is_decreasing else None,
        TOKENS_EXPONENT: 1 - law.params_exponent if law.is_decreasing else None,
        "intervals": {name: _interval_to_list(uncertainty.interval(name)) for name in names},
        "interval_method": INTERVALS,
        "noise": uncertainty.noise,
        "untold": undetermined_names(uncertainty.unidentifiable),
        "warnings": result.warnings,
        "points": len(result.fitted.points),
        "back_test": _back_test_to_dict(result.back_test),
        "isoflop": {
            "budgets": [_budget_to_dict(budget) for budget in result.budgets],
            "params_of_flops": None if result.best_size is None else asdict(result.best_size),
        },
        "test_loss": _line_to_dict(result.test_loss),
        "domain_losses": {domain: _line_to_dict(line) for domain, line in result.domain_losses.items()},
    }


def _budget_to_dict(budget: Budget) -> dict[str, Any]:
    return {
        "flops": budget.flops,
        "points": len(budget.points),
        "params": budget.best_params,
        "params_interval": budget.best_interval,
        "tokens": budget.best_tokens,
        "doubt": budget.doubt or None,
    }


def _line_to_dict(line: Line | None) -> dict[str, Any] | None:
    if line is None:
        return None
    return {
        "factor": line.factor,
        "exponent": line.exponent,
        "exponent_interval": list(line.exponent_interval),
        "deviation": line.deviation,
        "points": len(line.residuals),
    }


def _interval_to_list(interval: tuple[float, float]) -> list[float | None] | None:
    """Convert an interval to JSON: None if it is unknown, and None for an unbounded end."""
    return None if math.isnan(interval[0]) else [end if math.isfinite(end) else None for end in interval]


def _back_test_to_dict(back_test: BackTest | None) -> dict[str, Any] | None:
    if back_test is None:
        return None
    errors = np.abs(back_test.errors)
    return {
        "law": asdict(back_test.law),
        "held_out": len(back_test.held_out),
        "smallest_params": float(back_test.held_out.params.min()),
        "mean_error": float(errors.mean()),
        "largest_error": float(errors.max()),
        "bias": float(back_test.errors.mean()),
    }


# --- fit.md ----------------------------------------------------------------------------------------------------------


def format_markdown(result: ScalingFit) -> str:
    """Return the contents of fit.md."""
    lines = [f"L(N, D) = E + A / N^alpha + B / D^beta, nats per token, with {INTERVALS}.", ""]
    columns = ["mixer", "points", *CONSTANTS, "objective"]
    rows = []
    for mixer, own in result.mixers.items():
        cells = [_format_estimate(getattr(own.fitted.law, name), own.uncertainty.interval(name)) for name in CONSTANTS]
        rows.append([mixer or "all", str(len(own.fitted.points)), *cells, f"{own.fitted.objective:.5g}"])
    lines += [*table(columns, rows), ""]
    for mixer, own in result.mixers.items():
        for warning in own.warnings:
            lines += [f"{title(mixer, 'Warning')}: {warning}.", ""]
        lines += [f"{title(mixer, 'Best size')}: {_describe_best_size(own)}", ""]
        lines += [f"{title(mixer, 'Back-test')}: {describe_back_test(own.back_test)}", ""]
        lines += [f"{title(mixer, 'IsoFLOP')}: {describe_isoflop(own)}", ""]
        if own.test_loss is not None:
            lines += [f"{title(mixer, 'Test loss')}: {describe_test_loss(own.test_loss)}", ""]
    lines += _difference_lines(result.differences) + _domain_lines(result.domain_differences)
    if result.runs.excluded:
        lines += ["Runs that are not used:", "", *(f"- {run}" for run in result.runs.excluded)]
    return "\n".join(lines).rstrip() + "\n"


def _format_estimate(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.5g} ({format_interval(interval, '.3g') or 'unknown'})"


def format_interval(interval: tuple[float, float], form: str) -> str:
    """Format an interval with its bounded ends; empty if it is unknown.

    Args:
        interval: lower and upper end, as `Uncertainty.interval` returns them.
        form: format specification of an end.
    """
    low, high = interval
    if math.isnan(low) or (math.isinf(low) and math.isinf(high)):
        return "" if math.isnan(low) else "not bounded"
    if math.isinf(low):
        return f"at most {high:{form}}"
    return f"at least {low:{form}}" if math.isinf(high) else f"{low:{form}} to {high:{form}}"


def _describe_best_size(result: MixerFit) -> str:
    """Describe the growth of the optimal numbers of parameters and tokens with compute by the law."""
    law, uncertainty = result.fitted.law, result.uncertainty
    if not law.is_decreasing:
        return f"{NOT_FALLING}."
    params, tokens = (
        format_interval(uncertainty.interval(name), ".3f") or "unknown" for name in (PARAMS_EXPONENT, TOKENS_EXPONENT)
    )
    a = law.params_exponent
    return f"parameters grow as compute^{a:.3f} ({params}), tokens as compute^{1 - a:.3f} ({tokens})."


def describe_back_test(back_test: BackTest | None) -> str:
    """Describe a back-test."""
    if back_test is None:
        return "without the largest models, too few are left to fit a law."
    errors, n = np.abs(back_test.errors), len(back_test.held_out)
    smallest = f"{back_test.held_out.params.min():.3g}"
    return (
        f"the law without the {n} largest models (from {smallest} parameters on) is off by {100 * errors.mean():.2f} % "
        f"of their loss in the mean, at most {100 * errors.max():.2f} % (bias {100 * back_test.errors.mean():+.2f} %)."
    )


def describe_isoflop(result: MixerFit) -> str:
    """Describe the results of the IsoFLOP parabolas."""
    if not result.budgets:
        return "no four sizes have about the same compute."
    num_minima = sum(budget.best_params is not None for budget in result.budgets)
    doubts = "".join(
        f" Budget of {budget.flops:.3g} FLOPs: {budget.doubt}." for budget in result.budgets if budget.doubt
    )
    line = f"{num_minima} of {len(result.budgets)} budgets have a lowest loss among their sizes"
    if result.best_size is None:
        return f"{line}.{doubts}"
    interval = result.best_size.exponent_interval
    ends = "two budgets: interval unknown" if interval is None else f"{format_interval(interval, '.3f')}, 95 %"
    exponent = result.best_size.exponent
    return f"{line}; the best number of parameters grows as compute^{exponent:.3f} ({ends}).{doubts}"


def describe_test_loss(line: Line) -> str:
    """Describe the power law of test loss over training loss."""
    low, high = line.exponent_interval
    return (
        f"{line.factor:.4g} * loss^{line.exponent:.4g} (exponent {low:.3g} to {high:.3g}, 95 %); "
        f"the models deviate from it by {100 * line.deviation:.2f} %."
    )


def _difference_lines(differences: Sequence[MixerPair]) -> list[str]:
    if not differences:
        return []
    columns = ["mixer", "other", "p-value", "training loss", "relative test loss of other"]
    rows = [[first, second, f"{pair.p_value:.2g}", *format_difference(pair)] for first, second, pair in differences]
    return [
        "Whether two mixers have the same curve of test loss over training loss (Wald test for each pair):",
        "",
        *table(columns, rows),
        "",
    ]


def _domain_lines(differences: Sequence[DomainDifference]) -> list[str]:
    if not differences:
        return []
    columns = ["domain", "mixer", "other", "adjusted p-value", "training loss", "relative loss of other"]
    rows = [
        [d.domain, d.pair[0], d.pair[1], f"{d.adjusted_p_value:.2g}", *format_difference(d.pair[2])]
        for d in differences
    ]
    found = sum(d.adjusted_p_value < SIGNIFICANCE for d in differences)
    return [
        f"The same for each test domain. The p-values are adjusted for the {len(differences)} comparisons (Holm); "
        f"{found} of them are below {SIGNIFICANCE:g}:",
        "",
        *table(columns, rows),
        "",
    ]


def format_difference(pair: Difference) -> list[str]:
    """Format the middle of the training losses that two mixers share, and the ratio of their test losses there."""
    if pair.train_loss is None or pair.ratio is None or pair.interval is None:
        return ["none in common", "-"]
    low, high = (100 * (end - 1) for end in pair.interval)
    return [f"{pair.train_loss:.4g}", f"{100 * (pair.ratio - 1):+.2f} % ({low:+.2f} to {high:+.2f})"]
