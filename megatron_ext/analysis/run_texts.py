"""Warnings about runs that are trained or evaluated on other text than the rest, for the top of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from megatron_ext.analysis.run_files import Texts
from megatron_ext.analysis.runs import Run

_MOST_NAMED = 3
"""Maximum number of domains or runs that a sentence lists."""


def text_warnings(runs: Sequence[Run]) -> list[str]:
    """Return warnings about differences between the texts of runs; empty if all runs have the same text.

    Args:
        runs: runs of one comparison.
    """
    known = [(run, run.size.data) for run in runs if run.size is not None and run.size.data is not None]
    said = [
        *_unlike(known, lambda data: data.train, "trained", ("train",)),
        *_unlike(known, lambda data: data.evaluation, "evaluated", ("validation", "test")),
    ]
    if known and len(known) < len(runs):
        names = {id(run) for run, _ in known}
        without = [run.name for run in runs if id(run) not in names]
        said.append(
            f"{_some(without)} of an earlier version and did not keep which text it was trained on: it is taken to be "
            "the others'"
        )
    said += [
        f"{run.name} is evaluated on other text after step {run.other_text_until} than until then: its losses by "
        "domain before and after do not compare"
        for run in runs
        if run.other_text_until
    ]
    said += [
        f"{run.name} is evaluated on {', '.join(run.left_out)} at only some of its steps, because its test domains "
        "were changed: these evaluations are not used"
        for run in runs
        if run.left_out
    ]
    changed = [run for run in runs if run.size is not None and run.size.changed]
    for run in changed:
        assert run.size is not None
        what = ", ".join(f"{one['field']} at step {one['step']}" for one in run.size.changed)
        said.append(f"{run.name} was changed during training ({what}): no single configuration reproduces it")
    return said


def _unlike(
    known: Sequence[tuple[Run, Texts]], digest: Callable[[Texts], str], done: str, splits: Sequence[str]
) -> list[str]:
    """Return a sentence for each run whose text differs from the most common text. The first text wins a tie."""
    counts = Counter(digest(data) for _, data in known)
    if len(counts) < 2:
        return []
    usual = max(counts, key=lambda one: counts[one])
    first, like = next((run, data) for run, data in known if digest(data) == usual)
    return [
        f"{run.name} is {done} on other text than {first.name}: {_how(data, like, splits)}"
        for run, data in known
        if digest(data) != usual
    ]


def _how(data: Texts, other: Texts, splits: Sequence[str]) -> str:
    mine, theirs = (
        {(one["split"], one["domain"]): one for one in texts.texts if one["split"] in splits} for texts in (data, other)
    )
    phrases = []
    for key in dict.fromkeys([*mine, *theirs]):
        if mine.get(key) != theirs.get(key):
            counts = [
                f"{one[key]['documents']:,} documents, {one[key]['tokens']:,} tokens" if key in one else "none"
                for one in (mine, theirs)
            ]
            same = "the same number of documents and tokens, but different text"
            phrases.append(f"{key[1]} ({key[0]}): {same if counts[0] == counts[1] else ' against '.join(counts)}")
    more = f"; and {len(phrases) - _MOST_NAMED} more" if len(phrases) > _MOST_NAMED else ""
    return "; ".join(phrases[:_MOST_NAMED]) + more or "its domains have a different order"


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    return f"{listed} is" if len(names) == 1 else f"{listed} are"
