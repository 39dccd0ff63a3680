"""Which runs of the folders that a report is given can be compared, and why others cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ext.analysis.architecture import Architecture, group_runs
from megatron_ext.analysis.runs import Run, check_same_data, read_run, read_runs, run_folders
from megatron_ext.errors import UserError

NOT_EVALUATED = "has no out-of-domain evaluation: its training loss alone is shown"


@dataclass(frozen=True)
class Selected:
    """Runs of a report.

    Attributes:
        compared: those with out-of-domain evaluations over the same data.
        unevaluated: those whose training loss alone is known.
        left_out: of those that are not compared, the folder and why, in a sentence without its full stop.
    """

    compared: list[Run]
    unevaluated: list[Run]
    left_out: list[str]


def select_runs(paths: Sequence[Path]) -> Selected:
    """Read run folders, and those in folders of runs.

    A run that is named itself must be right; one in a folder of runs is left out where it is damaged or over other data
    than the first, and has its training loss shown where it was not evaluated.

    Args:
        paths: run folders, or folders of run folders.

    Raises:
        UserError: as `read_runs`, for runs that are named and where no run can be compared.
    """
    named = {path.resolve() for path in paths}
    folders = [folder for path in paths for folder in run_folders(path)]
    if {folder.resolve() for folder in folders} <= named or len({f.resolve() for f in folders}) < len(folders):
        return Selected(read_runs(paths), [], [])
    compared: list[Run] = []
    unevaluated: list[Run] = []
    left_out: list[str] = []
    for folder in folders:
        is_named = folder.resolve() in named
        try:
            run = read_run(folder, evaluated=is_named)
            check_same_data(run, compared[0] if compared else run)
            if run.split("test"):
                group_runs([*compared, run])  # refuses one that is there twice
                compared.append(run)
                continue
        except UserError as error:
            if is_named:
                raise
            left_out.append(f"{folder}: {error.problem} ({error.where})")
            continue
        unevaluated.append(run)
        left_out.append(f"{folder}: {NOT_EVALUATED}")
    if not compared:
        return Selected(read_runs(paths), [], [])  # says why, or finds that there is nothing to say
    return Selected(compared, unevaluated, left_out)


def with_unevaluated(architectures: Sequence[Architecture], runs: Sequence[Run]) -> list[Architecture]:
    """Architectures with further runs, each among its like, where there is one, else behind all others."""
    found = list(architectures)
    for one in group_runs(runs) if runs else ():
        places = [place for place, known in enumerate(found) if known.label == one.label]
        if places:
            found[places[0]] = replace(found[places[0]], runs=(*found[places[0]].runs, *one.runs))
        else:
            found.append(one)
    return found
