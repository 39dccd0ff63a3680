"""Tables of the decisions that runs made about faulty steps, of the data that they skipped, and of slow ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from megatron_ext.analysis.cells import NOTHING, Cell, Table, count, text
from megatron_ext.analysis.history import read_skipped
from megatron_ext.analysis.run_files import Record, parse_lines
from megatron_ext.analysis.runs import Run
from megatron_ext.run_folder.layout import DECISIONS, STRAGGLERS

DecisionKind = Literal["again", "skip", "roll_back", "stop", "changed"]

ACTIONS: dict[DecisionKind, str] = {
    "again": "computed again",
    "skip": "skipped",
    "roll_back": "rolled back",
    "stop": "run stopped",
    "changed": "continued with changes",
}
"""Description of each kind of decision, for the table of decisions."""

COUNT_COLUMNS: dict[DecisionKind, str] = {
    "again": "steps computed again",
    "skip": "steps skipped",
    "roll_back": "roll-backs",
    "stop": "stops",
    "changed": "changes during the run",
}
"""Column of the history table that counts each kind of decision."""

MAX_LISTED = 6
"""Maximum number of steps that a sentence lists."""

_LINE = ConfigDict(extra="ignore", strict=True)


@checked_dataclass(frozen=True, config=_LINE)
class Decision:
    """Line of decisions.jsonl: a step and the decision about it. `to_step` is the target of a roll-back."""

    time: str
    step: PositiveInt
    decision: DecisionKind
    line: str
    to_step: NonNegativeInt | None = None


@checked_dataclass(frozen=True, config=_LINE)
class RankComparison:
    """Line of stragglers.jsonl: a comparison of the ranks after a step, with a message for each slow rank."""

    step: NonNegativeInt
    slow: list[str]


@dataclass(frozen=True)
class RunDecisions:
    """Decisions and comparisons of ranks of a run.

    Attributes:
        run: the run.
        decisions: decisions of the run, in the order of the file.
        comparisons: comparisons of the ranks, in the order of the file.
    """

    run: Run
    decisions: Sequence[Decision]
    comparisons: Sequence[RankComparison]


def read_decisions(runs: Iterable[Run]) -> list[RunDecisions]:
    """Read decisions and comparisons of ranks of each run, in the order of the runs.

    Raises:
        UserError: a line is invalid.
    """
    return [
        RunDecisions(run, _read_lines(run, DECISIONS, Decision), _read_lines(run, STRAGGLERS, RankComparison))
        for run in runs
    ]


def decision_counts(entry: RunDecisions) -> dict[str, Cell]:
    """Return the number of steps of a run with each kind of decision, by column."""
    steps: dict[DecisionKind, set[int]] = {kind: set() for kind in COUNT_COLUMNS}
    for decision in entry.decisions:
        steps[decision.decision].add(decision.step)
    return {column: count(len(steps[kind])) if steps[kind] else NOTHING for kind, column in COUNT_COLUMNS.items()}


def decision_table(run_decisions: Sequence[RunDecisions]) -> Table:
    """Return a table with a row per decision."""
    rows = [
        [
            text(entry.run.name),
            text(decision.time),
            count(decision.step),
            text(ACTIONS[decision.decision]),
            text(decision.line),
        ]
        for entry in run_decisions
        for decision in entry.decisions
    ]
    caption = "Decisions about failed steps and changes during a run, with the reasons"
    return Table(caption, ["run", "time", "step", "action", "reason"], rows)


def slow_table(run_decisions: Sequence[RunDecisions]) -> Table:
    """Return a table with a row per rank that was slow at least once."""
    rows = []
    for entry in run_decisions:
        compared = len({comparison.step for comparison in entry.comparisons})
        for rank, messages in _slow_ranks(entry.comparisons).items():
            steps = sorted({step for step, _message in messages})
            frequency = Cell(f"{count(len(steps)).text} of {count(compared).text}", len(steps))
            _, last = messages[-1]
            rows.append([text(entry.run.name), text(rank), frequency, count(steps[0]), count(steps[-1]), text(last)])
    columns = ["run", "rank", "times slow", "first step", "last step", "last message"]
    return Table("Ranks that were slower than the others", columns, rows)


def _slow_ranks(comparisons: Iterable[RankComparison]) -> dict[str, list[tuple[int, str]]]:
    """Return the steps and messages of each slow rank."""
    by_rank: dict[str, list[tuple[int, str]]] = {}
    for comparison in comparisons:
        for line in comparison.slow:
            rank, _, message = line.partition(" is slow: ")
            by_rank.setdefault(rank, []).append((comparison.step, message))
    return by_rank


def data_differences(run_decisions: Sequence[RunDecisions]) -> list[str]:
    """Describe the data that each run skipped, a line per run that skipped any; empty if all runs skipped the same."""
    skipped_data = [(_skipped_steps(entry), _rolled_back(entry), _skipped_shards(entry.run)) for entry in run_decisions]
    if len(set(skipped_data)) == 1:
        return []
    return [
        f"{entry.run.name} {_describe_skipped(*data)}"
        for entry, data in zip(run_decisions, skipped_data, strict=True)
        if any(data)
    ]


def _skipped_steps(entry: RunDecisions) -> tuple[int, ...]:
    """Return the skipped steps, without those that the run repeated and completed after a resume."""
    completed = set(entry.run.steps.tolist())
    return tuple(sorted({decision.step for decision in entry.decisions if decision.decision == "skip"} - completed))


def _rolled_back(entry: RunDecisions) -> tuple[tuple[int, int], ...]:
    """Return, for each roll-back, the first and last step whose samples were skipped."""
    return tuple(
        ((decision.to_step or 0) + 1, decision.step) for decision in entry.decisions if decision.decision == "roll_back"
    )


def _skipped_shards(run: Run) -> tuple[tuple[tuple[str, ...], int, int | None], ...]:
    """Return (shards, step, until) for each range of steps in which a run skipped the same shards.

    The range begins after step `step`. It ends at step `until`, or lasts to the end of the run if that is None.
    """
    return tuple(
        (tuple(sorted(shard.shard for shard in step_range.record.shards)), step_range.record.step, step_range.until)
        for step_range in read_skipped(run)
    )


def _describe_skipped(
    steps: Sequence[int],
    rolled_back: Sequence[tuple[int, int]],
    shards: Sequence[tuple[Sequence[str], int, int | None]],
) -> str:
    phrases = []
    if steps:
        phrases.append(f"skipped the samples of {_plural(len(steps), 'step')} ({_list_first(steps)})")
    if rolled_back:
        ranges = [f"{first} to {last}" if first < last else f"{last}" for first, last in rolled_back]
        phrases.append(f"skipped the samples of steps that it rolled back ({_list_first(ranges)})")
    for names, first, until in shards:
        since = f" after step {first}" if first else ""
        phrases.append(
            f"skipped {_plural(len(names), 'shard')}{since}{'' if until is None else f' until step {until}'}"
        )
    return ", and ".join(phrases)


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _list_first(items: Sequence[int | str]) -> str:
    more = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return ", ".join(str(item) for item in items[:MAX_LISTED]) + more


def _read_lines(run: Run, name: str, kind: type[Record]) -> list[Record]:
    path = run.path / name
    if not path.exists():
        return []
    return [line.record for line in parse_lines(path, kind, "restore the file or remove it")]
