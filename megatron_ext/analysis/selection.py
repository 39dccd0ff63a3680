"""Selection of the runs of a report that can be compared, with the reasons why the others cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ext.analysis.architecture import Architecture, group_runs
from megatron_ext.analysis.runs import Run, check_same_data, read_run, read_runs, run_folders
from megatron_ext.utils.errors import UserError

NOT_EVALUATED = "has no out-of-domain evaluation: only its training loss is shown"


@dataclass(frozen=True)
class RunSelection:
    """Runs of a report.

    Attributes:
        compared: runs with out-of-domain evaluations on the same data.
        unevaluated: runs without such evaluations, of which only the training loss is shown.
        excluded: folder and reason for each run that is not compared, as a sentence without the full stop.
    """

    compared: list[Run]
    unevaluated: list[Run]
    excluded: list[str]


def select_runs(paths: Sequence[Path]) -> RunSelection:
    """Read run folders, and the run folders inside other folders.

    A run folder that is given directly must be valid. A run inside a folder of runs is excluded if it is damaged or
    uses other data than the first run. A valid run without evaluations shows its training loss.

    Args:
        paths: run folders, or folders of run folders.

    Raises:
        UserError: as in `read_runs`, for run folders that are given directly, or if no run can be compared.
    """
    given = {path.resolve() for path in paths}
    folders = [folder for path in paths for folder in run_folders(path)]
    if {folder.resolve() for folder in folders} <= given or len({f.resolve() for f in folders}) < len(folders):
        return RunSelection(read_runs(paths), [], [])
    compared: list[Run] = []
    unevaluated: list[Run] = []
    excluded: list[str] = []
    for folder in folders:
        is_given = folder.resolve() in given
        try:
            run = read_run(folder, evaluated=is_given)
            check_same_data(run, compared[0] if compared else run)
            if run.split("test"):
                group_runs([*compared, run])  # raises an error if the run is a duplicate
                compared.append(run)
                continue
        except UserError as error:
            if is_given:
                raise
            excluded.append(f"{folder}: {error.problem} ({error.where})")
            continue
        unevaluated.append(run)
        excluded.append(f"{folder}: {NOT_EVALUATED}")
    if not compared:
        return RunSelection(read_runs(paths), [], [])  # raises the error, if there is one
    return RunSelection(compared, unevaluated, excluded)


def with_unevaluated(architectures: Sequence[Architecture], runs: Sequence[Run]) -> list[Architecture]:
    """Add runs to the architectures with the same label, and new architectures for the others at the end."""
    combined = list(architectures)
    for added in group_runs(runs) if runs else ():
        index = next((i for i, known in enumerate(combined) if known.label == added.label), None)
        if index is None:
            combined.append(added)
        else:
            combined[index] = replace(combined[index], runs=(*combined[index].runs, *added.runs))
    return combined
