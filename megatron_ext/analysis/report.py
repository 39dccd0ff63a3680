"""The report of runs: what there is to compare, read before the libraries that draw and fit are imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_ext.analysis.run_texts import text_warnings
from megatron_ext.analysis.selection import select_runs


def _nothing(_line: str) -> None:
    """Say nothing."""


def write_report(
    run_dirs: Sequence[Path], output: Path, *, fit: bool = False, say: Callable[[str], object] = _nothing
) -> Path:
    """Compare runs and write index.html, its pictures as PNG, and what they and the tables show as CSV.

    The page shows loss over tokens, the comparison at matched training loss, what happened to the runs, and what the
    suites domains, retrieval and fewshot found of those that were put to them, each at its newest step; then
    suites.json holds the numbers.

    Files of an earlier report in `output` are replaced, each at once, and what it wrote and this one does not write
    goes, its scaling laws too; nothing is written if the runs cannot be compared, or no law can be fitted to them.

    Args:
        run_dirs: run folders, or folders of them; runs that differ in training.seed alone count as one architecture.
        output: folder of the report; made if it is not there.
        fit: fit scaling laws to the same runs, too, as `selectron fit` does; its files go to output/scaling.
        say: takes a few lines on what was compared and found, at the end.

    Returns:
        The path of index.html.

    Raises:
        UserError: a run folder is missing or damaged, the runs do not compare, no law can be fitted to them, or the
            output cannot be written.
    """
    selected = select_runs(run_dirs)
    for line in (*text_warnings(selected.compared), *selected.left_out):
        print(f"warning: {line}", file=sys.stderr)
    from megatron_ext.analysis.report_files import write_files  # with matplotlib and SciPy: a second of imports

    return write_files(selected, run_dirs, output, fit=fit, say=say)
