"""Entry point of the report; runs are read and checked before the slow imports of plotting and fitting libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_ext.analysis.matched_runs import Match
from megatron_ext.analysis.run_texts import epoch_warnings, text_warnings
from megatron_ext.analysis.selection import select_runs


def _discard(_line: str) -> None:
    """Discard a line."""


def write_report(
    run_dirs: Sequence[Path],
    output: Path,
    *,
    match: Match = "training",
    fit: bool = False,
    say: Callable[[str], object] = _discard,
) -> Path:
    """Compare runs and write index.html, its figures as PNG, and the numbers of figures and tables as CSV.

    The page shows what was found, loss over tokens, the comparison at matched loss and the history of the runs. It also
    shows the results of the suites domains, retrieval and fewshot of runs that have them, each at its newest step.
    Their numbers are in suites.json.

    Files of an earlier report in `output` are replaced atomically. Files of the earlier report that the new one does
    not have are removed, including scaling laws. Nothing is written if the runs cannot be compared or a law cannot be
    fitted.

    Args:
        run_dirs: run folders, or folders of run folders. Runs that differ only in training.seed are one architecture.
        output: folder of the report; created if it does not exist.
        match: the loss at which runs are compared: `training` or in-domain `validation` loss.
        fit: also fit scaling laws to the runs, as `selectron fit` does, and write them to output/scaling.
        say: called with each line of a summary at the end.

    Returns:
        The path of index.html.

    Raises:
        UserError: a run folder is missing or damaged, the runs cannot be compared, a law cannot be fitted, or the
            output cannot be written.
    """
    selected = select_runs(run_dirs)
    for line in (*text_warnings(selected.compared), *epoch_warnings(selected.compared), *selected.excluded):
        print(f"warning: {line}", file=sys.stderr)
    from megatron_ext.analysis.report_files import write_files  # imports matplotlib and SciPy: a second

    return write_files(selected, run_dirs, output, match=match, fit=fit, say=say)
