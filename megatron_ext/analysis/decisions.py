"""Tables of the decisions that runs made about faulty steps, of the data that they skipped, and of slow ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from megatron_ext.analysis.cells import NOTHING, Cell, Table, count, text
from megatron_ext.analysis.history import skipped
from megatron_ext.analysis.run_files import Record, parse_lines
from megatron_ext.analysis.runs import Run
from megatron_ext.run_folder.layout import DECISIONS, STRAGGLERS

Kind = Literal["again", "skip", "roll_back", "stop", "changed"]

DONE: dict[Kind, str] = {
    "again": "computed again",
    "skip": "skipped",
    "roll_back": "rolled back",
    "stop": "run stopped",
    "changed": "went on changed",
}
"""Description of each kind of decision, for the table of decisions."""

COLUMNS: dict[Kind, str] = {
    "again": "steps computed again",
    "skip": "steps skipped",
    "roll_back": "steps rolled back",
    "stop": "times stopped at a step",
    "changed": "times changed on the way",
}
"""Column of the history table that counts each kind of decision."""

MOST_NAMED = 6
"""Maximum number of steps that a sentence lists."""

_LINE = ConfigDict(extra="ignore", strict=True)


@checked_dataclass(frozen=True, config=_LINE)
class Decision:
    """Line of decisions.jsonl: a step and the decision about it. `to_step` is the target of a roll-back."""

    time: str
    step: PositiveInt
    decision: Kind
    line: str
    to_step: NonNegativeInt | None = None


@checked_dataclass(frozen=True, config=_LINE)
class Timed:
    """Line of stragglers.jsonl: a comparison of the ranks after a step, with a message for each slow rank."""

    step: NonNegativeInt
    slow: list[str]


@dataclass(frozen=True)
class Decided:
    """Decisions and rank timings of a run.

    Attributes:
        run: the run.
        decisions: decisions of the run, in the order of the file.
        timed: comparisons of the ranks' timings, in the order of the file.
    """

    run: Run
    decisions: Sequence[Decision]
    timed: Sequence[Timed]


def read_decided(runs: Iterable[Run]) -> list[Decided]:
    """Read decisions and rank timings of each run, in the order of the runs.

    Raises:
        UserError: a line is invalid.
    """
    return [Decided(run, _lines(run, DECISIONS, Decision), _lines(run, STRAGGLERS, Timed)) for run in runs]


def counts(one: Decided) -> dict[str, Cell]:
    """Return the number of steps of a run with each kind of decision, by column."""
    steps: dict[Kind, set[int]] = {kind: set() for kind in COLUMNS}
    for decision in one.decisions:
        steps[decision.decision].add(decision.step)
    return {column: count(len(steps[kind])) if steps[kind] else NOTHING for kind, column in COLUMNS.items()}


def decision_table(decided: Sequence[Decided]) -> Table:
    """Return a table with a row per decision."""
    rows = [
        [text(of.run.name), text(one.time), count(one.step), text(DONE[one.decision]), text(one.line)]
        for of in decided
        for one in of.decisions
    ]
    caption = "Failed steps, the action taken for each, and the reason"
    return Table(caption, ["run", "time", "step", "done", "why"], rows)


def slow_table(decided: Sequence[Decided]) -> Table:
    """Return a table with a row per rank that was slow at least once."""
    rows = []
    for of in decided:
        compared = len({one.step for one in of.timed})
        for rank, named in _slow_ranks(of.timed).items():
            steps = sorted({step for step, _line in named})
            often = Cell(f"{count(len(steps)).text} of {count(compared).text}", len(steps))
            _, last = named[-1]
            rows.append([text(of.run.name), text(rank), often, count(steps[0]), count(steps[-1]), text(last)])
    columns = ["run", "rank", "times slow", "first at step", "last at step", "the last time"]
    return Table("Ranks that were slower than the others", columns, rows)


def _slow_ranks(timed: Iterable[Timed]) -> dict[str, list[tuple[int, str]]]:
    """Return the steps and messages of each slow rank."""
    found: dict[str, list[tuple[int, str]]] = {}
    for one in timed:
        for line in one.slow:
            rank, _, said = line.partition(" is slow: ")
            found.setdefault(rank, []).append((one.step, said))
    return found


def unlike_data(decided: Sequence[Decided]) -> list[str]:
    """Describe the data that each run skipped, one line per run; empty if all runs skipped the same data."""
    found = [(_steps_without(one), _rolled_back(one), _shards_without(one.run)) for one in decided]
    if len(set(found)) == 1:
        return []
    return [f"{of.run.name} {_words(*left)}" for of, left in zip(decided, found, strict=True) if any(left)]


def _steps_without(of: Decided) -> tuple[int, ...]:
    """Return the skipped steps that the run has not completed later, after a resume from an earlier checkpoint."""
    done = set(of.run.steps.tolist())
    return tuple(sorted({one.step for one in of.decisions if one.decision == "skip"} - done))


def _rolled_back(of: Decided) -> tuple[tuple[int, int], ...]:
    """Return, for each roll-back, the first and last step whose samples were skipped."""
    return tuple(((one.to_step or 0) + 1, one.step) for one in of.decisions if one.decision == "roll_back")


def _shards_without(run: Run) -> tuple[tuple[tuple[str, ...], int, int | None], ...]:
    """Return (shards, first step, last step or None) for each period in which a run skipped the same shards."""
    return tuple(
        (tuple(sorted(shard.shard for shard in one.record.shards)), one.record.step, one.until) for one in skipped(run)
    )


def _words(
    steps: Sequence[int],
    back: Sequence[tuple[int, int]],
    without: Sequence[tuple[Sequence[str], int, int | None]],
) -> str:
    said = []
    if steps:
        said.append(f"left out the samples of {_several(len(steps), 'skipped step')} ({_named(steps)})")
    if back:
        ranges = [f"{first} to {last}" if first < last else f"{last}" for first, last in back]
        said.append(f"left out the samples of steps that it rolled back ({_named(ranges)})")
    for shards, first, until in without:
        since = f" after step {first}" if first else ""
        said.append(
            f"did without {_several(len(shards), 'shard')}{since}{'' if until is None else f' until step {until}'}"
        )
    return ", and ".join(said)


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _named(items: Sequence[int | str]) -> str:
    more = f" and {len(items) - MOST_NAMED} more" if len(items) > MOST_NAMED else ""
    return ", ".join(str(item) for item in items[:MOST_NAMED]) + more


def _lines(run: Run, name: str, kind: type[Record]) -> list[Record]:
    path = run.path / name
    if not path.exists():
        return []
    return [line.record for line in parse_lines(path, kind, "restore the file or remove it")]
