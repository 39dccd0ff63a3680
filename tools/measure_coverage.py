"""Measure how often confidence intervals contain the true value, and write the tables of docs/statistics.md.

    python tools/measure_coverage.py [--experiments 100] [laws isoflop transfer documents gaps studies]

Without names all tables are measured, which takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from coverage_of_documents import gap_coverage, percentile_coverage, ratio_coverage
from coverage_of_laws import heavy, isoflop_coverage, law_coverage, transfer_coverage, uneven
from coverage_of_studies import STUDIES, study_coverage

from megatron_ext.utils.markdown import table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "statistics.md"

Rows = Iterator[tuple[str, Mapping[str, float]]]


def laws(experiments: int) -> Rows:
    """Yield rows of the table of scaling laws: constants, exponents and losses."""
    for number in (6, 9, 16, 50):
        for noise in (0.001, 0.01):
            yield f"{number} points, noise {100 * noise:g} %", law_coverage(number, noise, experiments)
    for kind, experiment in ((heavy, "Student's t with 3 degrees"), (uneven, "three times as much for the smallest")):
        for number in (9, 50):
            yield f"{number} points, 0.3 %, {experiment}", law_coverage(number, 0.003, experiments, kind=kind)


def isoflop(experiments: int) -> Rows:
    """Yield rows of the table of parabolas' minima. `bounded` is the share of intervals with two finite ends."""
    for sizes, noise in ((5, 0.001), (9, 0.001), (9, 0.003)):
        yield f"{sizes} sizes, noise {100 * noise:g} %", isoflop_coverage(sizes, noise, experiments)


def transfer(experiments: int) -> Rows:
    """Yield rows of the table of test loss as a function of training loss."""
    for numbers, spread, error in (
        ((4, 4), (0.01, 0.01), 0.0),
        ((4, 12), (0.01, 0.01), 0.0),
        ((4, 12), (0.02, 0.01), 0.0),
        ((4, 12), (0.01, 0.02), 0.0),
        ((3, 12), (0.02, 0.01), 0.0),
        ((8, 8), (0.01, 0.01), 0.003),
    ):
        models, scatter = " and ".join(map(str, numbers)), " and ".join(f"{100 * x:g}" for x in spread)
        exact = f", training loss off by {100 * error:g} %" if error else ""
        yield (
            f"{models} models, scatter {scatter} %{exact}",
            transfer_coverage(numbers, spread, error, 10 * experiments),
        )


def documents(experiments: int) -> Rows:
    """Yield rows of the table of losses by domain."""
    for corpus in ("web", "one length", "books and notes", "heavy tail"):
        for number in (3, 5, 10, 20, 50, 200, *((1000,) if corpus == "heavy tail" else ())):
            interval_coverage = ratio_coverage(number, 20 * experiments, corpus)
            yield (
                f"{corpus}, {number} documents",
                {
                    "interval": interval_coverage,
                    "percentile bootstrap": percentile_coverage(number, 4 * experiments, corpus),
                },
            )


def gaps(experiments: int) -> Rows:
    """Yield rows of the table of gaps at matched training loss."""
    for numbers in ((5,), (10,), (20,), (50,), (200,), (5, 30, 8), (1, 1, 40)):
        for noise in (0.0, 0.05):
            experiment = f"{' and '.join(map(str, numbers))} documents, batch noise {noise:g} nats"
            coverage = gap_coverage(numbers, noise, 3 * experiments)
            yield experiment, coverage if numbers[0] > 2 else {"all": coverage["all"]}


def studies(experiments: int) -> Rows:
    """Yield rows of the table of synthetic studies: coverage of intervals, and errors of the answers to a claim."""
    for name, study in STUDIES.items():
        yield name, study_coverage(study, 2 * experiments)


TABLES = {
    "laws": laws,
    "isoflop": isoflop,
    "transfer": transfer,
    "documents": documents,
    "gaps": gaps,
    "studies": studies,
}


def replace_table(text: str, name: str, lines: list[str]) -> str:
    """Return the page with the table `name` replaced by `lines`."""
    pattern = re.compile(rf"(<!-- {name} -->\n)(\|[^\n]*\n)*")
    return pattern.sub(lambda match: match.group(1) + "\n".join(lines) + "\n", text)


def main() -> None:
    """Measure the chosen tables and write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--experiments", type=int, default=100, help="experiments per row; tables of fast experiments use a multiple"
    )
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="tables to measure (default: all)")
    args = parser.parse_args()
    for name in args.tables or TABLES:
        results = list(TABLES[name](args.experiments))
        columns = list(results[0][1])
        rows = [
            [experiment, *(f"{coverage[x]:.3f}" if x in coverage else "" for x in columns)]
            for experiment, coverage in results
        ]
        PAGE.write_text(replace_table(PAGE.read_text(), name, table(["experiment", *columns], rows)))
        print(f"{name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
