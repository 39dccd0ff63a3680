"""What `selectron fit` does: a scaling law of the points in a CSV file, for each mixer, with its uncertainty."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.analysis.scaling.isoflop import Budget, PowerLaw, best_sizes, budgets
from megatron_ext.analysis.scaling.law import Fit, check_points, fit
from megatron_ext.analysis.scaling.points import Points, read_points
from megatron_ext.analysis.scaling.uncertainty import BackTest, Sampled, back_test, bootstrap
from megatron_ext.errors import UserError
from megatron_ext.files import write_whole
from megatron_ext.reports import digits, table, write_both

CONSTANTS = ("E", "A", "B", "alpha", "beta")


@dataclass(frozen=True)
class Found:
    """What was found of one mixer.

    Attributes:
        fitted: the law.
        sampled: its uncertainty.
        tested: its back-test.
        budgets: IsoFLOP parabolas.
        best: how the best size grows with compute, by them.
    """

    fitted: Fit
    sampled: Sampled
    tested: BackTest | None
    budgets: list[Budget]
    best: PowerLaw | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    columns = "CSV file with the columns params, tokens, loss, and mixer where there are several"
    add("points", type=Path, metavar="CSV", help=columns)
    add("--output", type=Path, required=True, metavar="DIR", help="folder for fit.json, fit.md and pictures")
    add("--json", action="store_true", help="print the numbers as JSON, not as a table")
    highest = "leave out the N highest losses of each mixer (default %(default)s)"
    add("--drop-highest", type=int, default=0, metavar="N", help=highest)
    add("--bootstrap", type=int, default=1000, metavar="N", help="draws behind the intervals (default %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of the draws (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Fit, write what was found, and print it.

    Args:
        args: see `add_arguments`.

    Returns:
        The exit code.

    Raises:
        UserError: an option is out of its range, the file is at fault, or no law can be fitted to its points.
    """
    if args.bootstrap < 2:
        raise UserError("--bootstrap", f"{args.bootstrap} draws make no interval", "give 2 or more; 1000 are usual")
    if args.drop_highest < 0:
        raise UserError("--drop-highest", f"{args.drop_highest} is below 0", "give 0 to keep all points")
    points = {mixer: _kept(some, args.drop_highest) for mixer, some in read_points(args.points).items()}
    for mixer, some in points.items():
        check_points(some, f"{args.points} ({mixer})" if mixer else str(args.points))
    found = {mixer: _find(some, args) for mixer, some in points.items()}
    numbers, text = _numbers(found), _text(found)
    _write(args.output, found, numbers, text)
    print(json.dumps(numbers, indent=1) if args.json else text)
    return 0


def _kept(points: Points, dropped: int) -> Points:
    order = np.argsort(points.losses, kind="stable")
    return points.take(np.sort(order[: max(0, len(points) - dropped)]))


def _find(points: Points, args: argparse.Namespace) -> Found:
    fitted = fit(points)
    sampled = bootstrap(fitted, args.bootstrap, args.seed, progress=sys.stderr.isatty())
    of_compute = budgets(points)
    return Found(fitted, sampled, back_test(points), of_compute, best_sizes(of_compute))


def _write(output: Path, found: Mapping[str, Found], numbers: dict[str, Any], text: str) -> None:
    from megatron_ext.analysis.scaling.figures import draw_budgets, draw_law

    try:
        output.mkdir(parents=True, exist_ok=True)
        for mixer, one in found.items():
            ending = f"_{re.sub(r'[^A-Za-z0-9.+-]+', '_', mixer)}" if mixer else ""
            picture = draw_law(one.fitted, one.sampled, _title(mixer, "Scaling law"))
            write_whole(output / f"scaling{ending}.png", picture)
            if one.budgets:
                picture = draw_budgets(one.budgets, _title(mixer, "IsoFLOP"))
                write_whole(output / f"isoflop{ending}.png", picture)
        write_both(output, "fit", numbers, text)
    except OSError as error:
        mend = "give another folder with --output or make room"
        raise UserError(str(output), f"cannot be written ({error.strerror})", mend) from None


def _title(mixer: str, what: str) -> str:
    return f"{what}: {mixer}" if mixer else what


def _numbers(found: Mapping[str, Found]) -> dict[str, Any]:
    """For machines: of the one law, or by mixer."""
    by_mixer = {mixer: _numbers_of(one) for mixer, one in found.items()}
    return by_mixer[""] if list(by_mixer) == [""] else {"mixers": by_mixer}


def _numbers_of(found: Found) -> dict[str, Any]:
    law = found.fitted.law
    return {
        **asdict(law),
        "objective": found.fitted.objective,
        "intervals": {name: _known(found.sampled.interval(name)) for name in (*CONSTANTS, "objective")},
        "draws": len(found.sampled.laws),
        "points": len(found.fitted.points),
        "back_test": _numbers_of_test(found.tested),
        "isoflop": {
            "budgets": [
                {"flops": one.flops, "points": len(one.points), "params": one.best_params, "tokens": one.best_tokens}
                for one in found.budgets
            ],
            "params_of_flops": None if found.best is None else asdict(found.best),
        },
    }


def _known(interval: tuple[float, float]) -> list[float] | None:
    return None if math.isnan(interval[0]) else list(interval)


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


def _text(found: Mapping[str, Found]) -> str:
    """For readers: Markdown."""
    lines = ["L(N, D) = E + A / N^alpha + B / D^beta, nats a token, with 95 % bootstrap intervals", ""]
    columns = ["mixer", "points", *CONSTANTS, "objective"]
    rows = []
    for mixer, one in found.items():
        cells = [_with_interval(getattr(one.fitted.law, name), one.sampled.interval(name)) for name in CONSTANTS]
        rows.append([mixer or "all", str(len(one.fitted.points)), *cells, f"{one.fitted.objective:.5g}"])
    lines += [*table(columns, rows), ""]
    for mixer, one in found.items():
        lines += [f"{_title(mixer, 'Back-test')}: {_test_line(one.tested)}", ""]
        lines += [f"{_title(mixer, 'IsoFLOP')}: {_budget_line(one)}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _with_interval(value: float, interval: tuple[float, float]) -> str:
    low, high = interval
    if math.isnan(low):
        return f"{value:.5g} (unknown)"
    return f"{value:.5g} ({digits(low)} to {digits(high)})"


def _test_line(tested: BackTest | None) -> str:
    if tested is None:
        return "without the largest models too little is left to fit a law to."
    errors, n = np.abs(tested.errors), len(tested.held_out)
    smallest = f"{tested.held_out.params.min():.3g}"
    return (
        f"the law without the {n} largest models (from {smallest} parameters on) is off by {100 * errors.mean():.2f} % "
        f"of their loss in the mean, at most {100 * errors.max():.2f} % (bias {100 * tested.errors.mean():+.2f} %)."
    )


def _budget_line(found: Found) -> str:
    told = [one for one in found.budgets if one.best_params is not None]
    if not found.budgets:
        return "no four sizes have about the same compute."
    line = f"{len(told)} of {len(found.budgets)} budgets have a lowest loss among their sizes"
    if found.best is None:
        return f"{line}."
    return f"{line}; the best number of parameters grows as compute^{found.best.exponent:.3f}."
