"""Output files of a report: figures, tables and a self-contained HTML page."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_ext.analysis.choice_output import choice_figures
from megatron_ext.analysis.choices import choose_runs, chosen_fields
from megatron_ext.analysis.curves import domain_curves, training_curves
from megatron_ext.analysis.decisions import read_decisions
from megatron_ext.analysis.figure import domain_shift, matched_loss
from megatron_ext.analysis.findings import summary_lines
from megatron_ext.analysis.matched import compare
from megatron_ext.analysis.matched_runs import Match
from megatron_ext.analysis.matched_tables import render_table
from megatron_ext.analysis.output import replace_files
from megatron_ext.analysis.page import Contents, render_page
from megatron_ext.analysis.runs import Run
from megatron_ext.analysis.scaling import fit_output
from megatron_ext.analysis.scaling.fitting import Options, ScalingFit, fit_all
from megatron_ext.analysis.scaling.run_points import by_mixer, run_points
from megatron_ext.analysis.scaling.section import section
from megatron_ext.analysis.selection import RunSelection, with_unevaluated
from megatron_ext.analysis.suites import Suites, as_tables, heat_maps, read_suites, to_dict
from megatron_ext.utils.atomic_files import os_error_reason, write_atomically
from megatron_ext.utils.errors import UserError

SCALING = "scaling"
"""Subfolder of the report for scaling laws."""

RECORD = "report.json"
FILE_NAMES = re.compile(
    r"(training_loss|domain_loss|domain_shift|choice|matched_loss|domains|retrieval|fewshot|suites)[A-Za-z0-9_.+-]*\.(png|csv|json)"
    rf"|{SCALING}/({fit_output.FILE_NAMES.pattern}|fit\.(json|md))"
)
"""Pattern of the file names besides index.html and report.json, including those of a fit."""


def write_files(
    selected: RunSelection,
    run_dirs: Sequence[Path],
    output: Path,
    *,
    match: Match,
    fit: bool,
    say: Callable[[str], object],
) -> Path:
    """Compare the selected runs and write the report, as described in `report.write_report`.

    Args:
        selected: the runs.
        run_dirs: arguments of the user, for messages.
        output: folder of the report.
        match: the loss at which runs are compared.
        fit: whether to fit scaling laws.
        say: called with each line of a summary.

    Returns:
        The path of index.html.

    Raises:
        UserError: the runs cannot be compared, a law cannot be fitted, or the output cannot be written.
    """
    choices = choose_runs(selected.compared, chosen_fields(selected.compared))
    # The fit makes the same choice among all runs.
    laws = _fit(selected.compared, run_dirs) if fit else None
    comparison = compare(choices.runs, match=match)
    architectures = comparison.architectures
    matched, shift = matched_loss(comparison), domain_shift(comparison)
    run_decisions = read_decisions(run for architecture in architectures for run in architecture.runs)
    curves = [
        training_curves(with_unevaluated(architectures, selected.unevaluated), run_decisions),
        domain_curves(architectures),
    ]
    suites = read_suites(architectures)
    chosen = choice_figures(choices, architectures)
    pictures = [*curves, matched, *chosen, *([shift] if shift else [])]
    files = {name: content for picture in pictures for name, content in picture.files().items()}
    files["matched_loss.csv"] = render_table(comparison).encode()
    files |= _suite_files(suites)
    scaling = None if laws is None else section(laws)
    scaling_files = [f"{SCALING}/{name}" for name in (scaling.files if scaling else ())]
    page = render_page(
        Contents(
            comparison=comparison,
            matched=matched,
            shift=shift,
            choices=choices,
            choice_figures=chosen,
            curves=curves,
            suites=suites,
            scaling=scaling,
            run_decisions=run_decisions,
            files=[*files, *scaling_files],
            excluded=selected.excluded,
        )
    )
    _write(output, page, files, laws, scaling_files)
    for line in choices.warnings if laws is None else ():  # the fit has printed them
        print(f"warning: {line}", file=sys.stderr)
    for line in (f"report: {output / 'index.html'}", *summary_lines(comparison)):
        say(line)
    return output / "index.html"


def _suite_files(suites: Sequence[Suites]) -> dict[str, bytes]:
    """Return heat maps, tables and JSON of the suites' results by file name."""
    files = {f"{heat_map.name}.png": heat_map.png for heat_map in heat_maps(suites)}
    files |= {name: table.encode() for name, table in as_tables(suites).items()}
    if suites:
        files["suites.json"] = (json.dumps(to_dict(suites), indent=1) + "\n").encode()
    return files


def _write(
    output: Path, page: str, files: Mapping[str, bytes], laws: ScalingFit | None, scaling_files: Sequence[str]
) -> None:
    """Write the page, its record and the other files, after those of the laws.

    Raises:
        UserError: the output cannot be written.
    """
    try:
        if laws is not None:
            fit_output.write_fit(laws, output / SCALING)
        replace_files(output, files, RECORD, FILE_NAMES, others=scaling_files)
        write_atomically(output / RECORD, (json.dumps({"files": [*files, *scaling_files]}, indent=1) + "\n").encode())
        write_atomically(output / "index.html", page.encode())
    except OSError as error:
        problem = f"the report cannot be written ({os_error_reason(error)})"
        raise UserError(str(output), problem, "give another folder with --output or free disk space") from None


def _fit(runs: Sequence[Run], run_dirs: Sequence[Path]) -> ScalingFit:
    points = run_points(runs)
    return fit_all(by_mixer(points), ", ".join(map(str, run_dirs)), Options(), points)
