"""What `selectron fit` does: a scaling law of runs or of points in a CSV file, for each mixer, with its uncertainty."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, count
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.analysis.scaling.isoflop import Budget, PowerLaw, best_sizes, budgets
from megatron_ext.analysis.scaling.law import Fit, check_points, fit
from megatron_ext.analysis.scaling.points import Points, read_points
from megatron_ext.analysis.scaling.run_points import RunPoint, as_csv, by_mixer, points_of_runs
from megatron_ext.analysis.scaling.transfer import Difference, Line, difference, line_of
from megatron_ext.analysis.scaling.uncertainty import BackTest, Sampled, back_test, bootstrap
from megatron_ext.errors import UserError
from megatron_ext.files import write_whole
from megatron_ext.reports import table, write_both

CONSTANTS = ("E", "A", "B", "alpha", "beta")

WRITTEN = re.compile(r"(scaling|isoflop|test_loss)[A-Za-z0-9_.+-]*\.png|points\.csv")
"""Names of the files beside fit.json and fit.md."""

Pair = tuple[str, str, Difference]
"""Two mixers, and how their test losses differ."""


@dataclass(frozen=True)
class Found:
    """What was found of one mixer.

    Attributes:
        fitted: the law.
        sampled: its uncertainty.
        tested: its back-test.
        budgets: IsoFLOP parabolas.
        best: how the best size grows with compute, by them.
        transfer: test loss over training loss; None: there are no test losses, or too few.
    """

    fitted: Fit
    sampled: Sampled
    tested: BackTest | None
    budgets: list[Budget]
    best: PowerLaw | None
    transfer: Line | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    columns = "a CSV file with the columns params, tokens, loss, mixer where there are several, and test_loss if known"
    add("points", type=Path, nargs="+", metavar="RUN|CSV", help=f"run folders, folders of run folders, or {columns}")
    add("--output", type=Path, required=True, metavar="DIR", help="folder for fit.json, fit.md and pictures")
    add("--json", action="store_true", help="print the numbers as JSON, not as a table")
    without = "count parameters of runs without embeddings and output layer"
    add("--without-embeddings", action="store_true", help=without)
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
    where, read, runs = _read(args.points, embeddings=not args.without_embeddings)
    points = {mixer: _kept(some, args.drop_highest) for mixer, some in read.items()}
    for mixer, some in points.items():
        check_points(some, f"{where} ({mixer})" if mixer else where)
    found = {mixer: _find(some, args) for mixer, some in points.items()}
    apart = _differences(found)
    numbers, text = _numbers(found, apart), _text(found, apart)
    files = _pictures(found) | ({"points.csv": as_csv(runs).encode()} if runs else {})
    _write(args.output, files, numbers, text, args.points[0])
    print(json.dumps(numbers, indent=1) if args.json else text)
    return 0


def _read(paths: Sequence[Path], *, embeddings: bool) -> tuple[str, dict[str, Points], list[RunPoint]]:
    """What messages call it, the points by mixer, and the runs that they are of; none of a CSV file."""
    files = [path for path in paths if path.is_file() or path.suffix.lower() == ".csv"]
    if not files:
        runs = points_of_runs(paths, embeddings=embeddings)
        return ", ".join(map(str, paths)), by_mixer(runs), runs
    if len(paths) > 1:
        raise UserError(str(files[0]), "stands beside other arguments", "give one CSV file alone, or run folders")
    if not embeddings:
        raise UserError("--without-embeddings", "says nothing of a CSV file", "give the number in its column params")
    return str(files[0]), read_points(files[0]), []


def _kept(points: Points, dropped: int) -> Points:
    order = np.argsort(points.losses, kind="stable")
    return points.take(np.sort(order[: max(0, len(points) - dropped)]))


def _find(points: Points, args: argparse.Namespace) -> Found:
    fitted = fit(points)
    sampled = bootstrap(fitted, args.bootstrap, args.seed, progress=sys.stderr.isatty())
    of_compute = budgets(points)
    transfer = None if points.test_losses is None else line_of(points.losses, points.test_losses)
    return Found(fitted, sampled, back_test(points), of_compute, best_sizes(of_compute), transfer)


def _lines(found: Mapping[str, Found]) -> dict[str, Line]:
    return {mixer: one.transfer for mixer, one in found.items() if one.transfer is not None}


def _differences(found: Mapping[str, Found]) -> list[Pair]:
    """Of each pair of mixers, in their order."""
    return [(a, b, difference(one, other)) for (a, one), (b, other) in combinations(_lines(found).items(), 2)]


def _write(output: Path, files: Mapping[str, bytes], numbers: dict[str, Any], text: str, source: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name in _files_before(output) - set(files):
            if (output / name).resolve() != source.resolve():
                (output / name).unlink(missing_ok=True)
        for name, content in files.items():
            write_whole(output / name, content)
        write_both(output, "fit", {**numbers, "files": list(files)}, text)
    except OSError as error:
        mend = "give another folder with --output or make room"
        raise UserError(str(output), f"cannot be written ({error.strerror})", mend) from None


def _pictures(found: Mapping[str, Found]) -> dict[str, bytes]:
    """PNG by file name."""
    from megatron_ext.analysis.scaling.figures import draw_budgets, draw_law, draw_transfer

    pictures: dict[str, bytes] = {}
    for mixer, one in found.items():
        pictures[_free(pictures, "scaling", mixer)] = draw_law(one.fitted, one.sampled, _title(mixer, "Scaling law"))
        if one.budgets:
            pictures[_free(pictures, "isoflop", mixer)] = draw_budgets(one.budgets, _title(mixer, "IsoFLOP"))
    if lines := _lines(found):
        pictures["test_loss.png"] = draw_transfer(lines)
    return pictures


def _free(taken: Collection[str], kind: str, mixer: str) -> str:
    """A file name that no other mixer has: names that differ in signs alone would be one."""
    plain = f"{kind}_{re.sub(r'[^A-Za-z0-9.+-]+', '_', mixer)}" if mixer else kind
    names = (f"{plain}{f'_{number}' if number > 1 else ''}.png" for number in count(1))
    return next(name for name in names if name not in taken)


def _files_before(output: Path) -> set[str]:
    """Those of an earlier fit into this folder: only what it says it wrote may be removed."""
    try:
        names = json.loads((output / "fit.json").read_bytes())["files"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return set()
    listed = names if isinstance(names, list) else []
    return {name for name in listed if isinstance(name, str) and WRITTEN.fullmatch(name)}


def _title(mixer: str, what: str) -> str:
    return f"{what}: {mixer}" if mixer else what


def _numbers(found: Mapping[str, Found], differences: Sequence[Pair]) -> dict[str, Any]:
    """For machines: of the one law, or by mixer."""
    by_mixer = {mixer: _numbers_of(one) for mixer, one in found.items()}
    if list(by_mixer) == [""]:
        return by_mixer[""]
    pairs = [{"mixer": one, "other": other, **asdict(apart)} for one, other, apart in differences]
    return {"mixers": by_mixer, "test_loss_differences": pairs}


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


def _text(found: Mapping[str, Found], differences: Sequence[Pair]) -> str:
    """For readers: Markdown."""
    lines = ["L(N, D) = E + A / N^alpha + B / D^beta, nats a token, with 95 % bootstrap intervals", ""]
    columns = ["mixer", "points", *CONSTANTS, "objective"]
    rows = []
    for mixer, one in found.items():
        cells = [_with_interval(getattr(one.fitted.law, name), one.sampled.interval(name)) for name in CONSTANTS]
        rows.append([mixer or "all", str(len(one.fitted.points)), *cells, f"{one.fitted.objective:.5g}"])
    lines += [*table(columns, rows), ""]
    for mixer, one in found.items():
        if not one.fitted.law.falls:
            why = "an exponent is not above 0: loss does not fall with it, and the law says nothing of larger models"
            lines += [f"{_title(mixer, 'Warning')}: {why}.", ""]
        lines += [f"{_title(mixer, 'Back-test')}: {_test_line(one.tested)}", ""]
        lines += [f"{_title(mixer, 'IsoFLOP')}: {_budget_line(one)}", ""]
        if one.transfer is not None:
            lines += [f"{_title(mixer, 'Test loss')}: {_transfer_line(one.transfer)}", ""]
    lines += _difference_lines(differences)
    return "\n".join(lines).rstrip() + "\n"


def _with_interval(value: float, interval: tuple[float, float]) -> str:
    low, high = interval
    if math.isnan(low):
        return f"{value:.5g} (unknown)"
    return f"{value:.5g} ({low:.3g} to {high:.3g})"


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


def _transfer_line(line: Line) -> str:
    low, high = line.exponent_interval
    return (
        f"{line.factor:.4g} * loss^{line.exponent:.4g} (exponent {low:.3g} to {high:.3g}, 95 %), "
        f"and models {100 * line.deviation:.2f} % about it."
    )


def _difference_lines(differences: Sequence[Pair]) -> list[str]:
    if not differences:
        return []
    columns = ["mixer", "other", "p-value", "at training loss", "other's test loss beside"]
    rows = [[one, other, f"{apart.p_value:.2g}", *_apart(apart)] for one, other, apart in differences]
    return [
        "Test loss over training loss, whether two mixers have the same curve (F-test, each pair by itself):",
        "",
        *table(columns, rows),
        "",
    ]


def _apart(apart: Difference) -> list[str]:
    if apart.train_loss is None or apart.ratio is None or apart.interval is None:
        return ["none in common", "-"]
    low, high = (100 * (x - 1) for x in apart.interval)
    return [f"{apart.train_loss:.4g}", f"{100 * (apart.ratio - 1):+.2f} % ({low:+.2f} to {high:+.2f})"]
