"""What runs did about steps that went wrong, what they left out of their data by it, and which ranks were slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from megatron_ext.analysis.cells import NOTHING, Cell, Table, count, text
from megatron_ext.analysis.history import skipped
from megatron_ext.analysis.runs import Record, Run, parse_lines

DECISIONS, STRAGGLERS = "decisions.jsonl", "stragglers.jsonl"
"""Of a run of which a step went wrong, and of one whose ranks were timed."""

Kind = Literal["again", "skip", "roll_back", "stop", "changed"]

DONE: dict[Kind, str] = {
    "again": "computed again",
    "skip": "skipped",
    "roll_back": "rolled back",
    "stop": "run stopped",
    "changed": "went on changed",
}
"""What was done, in words."""

COLUMNS: dict[Kind, str] = {
    "again": "steps computed again",
    "skip": "steps skipped",
    "roll_back": "steps rolled back",
    "stop": "times stopped at a step",
    "changed": "times changed on the way",
}
"""Of the table of what happened."""

MOST_NAMED = 6
"""Steps that a sentence names one by one."""

_LINE = ConfigDict(extra="ignore", strict=True)


@checked_dataclass(frozen=True, config=_LINE)
class Decision:
    """A line of decisions.jsonl: a step that went wrong and what was done; `to_step`: where a roll-back went on."""

    time: str
    step: PositiveInt
    decision: Kind
    line: str
    to_step: NonNegativeInt | None = None


@checked_dataclass(frozen=True, config=_LINE)
class Timed:
    """A line of stragglers.jsonl: after a step, a line for each rank that was slow."""

    step: NonNegativeInt
    slow: list[str]


@dataclass(frozen=True)
class Decided:
    """What a run's folder tells of its steps and ranks.

    Attributes:
        run: the run.
        decisions: in their order.
        timed: whenever its ranks were compared.
    """

    run: Run
    decisions: Sequence[Decision]
    timed: Sequence[Timed]


def read_decided(runs: Iterable[Run]) -> list[Decided]:
    """Of each run, in their order.

    Raises:
        UserError: a line is not what training has written.
    """
    return [Decided(run, _lines(run, DECISIONS, Decision), _lines(run, STRAGGLERS, Timed)) for run in runs]


def counts(one: Decided) -> dict[str, Cell]:
    """Steps of a run that something was done about, by column."""
    steps: dict[Kind, set[int]] = {kind: set() for kind in COLUMNS}
    for decision in one.decisions:
        steps[decision.decision].add(decision.step)
    return {column: count(len(steps[kind])) if steps[kind] else NOTHING for kind, column in COLUMNS.items()}


def decision_table(decided: Sequence[Decided]) -> Table:
    """A row a decision."""
    rows = [
        [text(of.run.name), text(one.time), count(one.step), text(DONE[one.decision]), text(one.line)]
        for of in decided
        for one in of.decisions
    ]
    caption = "Steps that went wrong, what was done about each, and why"
    return Table(caption, ["run", "time", "step", "done", "why"], rows)


def slow_table(decided: Sequence[Decided]) -> Table:
    """A row a rank that was slow, however often."""
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
    """Steps and lines that name it, by rank."""
    found: dict[str, list[tuple[int, str]]] = {}
    for one in timed:
        for line in one.slow:
            rank, _, said = line.partition(" is slow: ")
            found.setdefault(rank, []).append((one.step, said))
    return found


def unlike_data(decided: Sequence[Decided]) -> list[str]:
    """What each run left out of its data, a line a run; none where all left out the same."""
    found = [(_steps_without(one), _rolled_back(one), _shards_without(one.run)) for one in decided]
    if len(set(found)) == 1:
        return []
    return [f"{of.run.name} {_words(*left)}" for of, left in zip(decided, found, strict=True) if any(left)]


def _steps_without(of: Decided) -> tuple[int, ...]:
    """Steps that were skipped, and not made later: a run that went on from an earlier checkpoint may have."""
    done = set(of.run.steps.tolist())
    return tuple(sorted({one.step for one in of.decisions if one.decision == "skip"} - done))


def _rolled_back(of: Decided) -> tuple[tuple[int, int], ...]:
    """(first, last) step whose samples were left behind, of each roll-back."""
    return tuple(((one.to_step or 0) + 1, one.step) for one in of.decisions if one.decision == "roll_back")


def _shards_without(run: Run) -> tuple[tuple[tuple[str, ...], int, int | None], ...]:
    """(shards, step from which, step until which) of each change of what a run did without."""
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
