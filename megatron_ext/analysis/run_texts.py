"""Warnings about runs that are trained or evaluated on other text than the other runs, for the top of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from megatron_ext.analysis.run_files import Texts
from megatron_ext.analysis.runs import Run

_MAX_LISTED = 3
"""Maximum number of domains or runs that a sentence lists."""


def text_warnings(runs: Sequence[Run]) -> list[str]:
    """Return warnings about differences between the texts of runs; empty if all runs have the same text.

    Args:
        runs: runs of one comparison.
    """
    known = [(run, run.size.data) for run in runs if run.size is not None and run.size.data is not None]
    warnings = [
        *_text_differences(known, lambda data: data.train, "trained", ("train",)),
        *_text_differences(known, lambda data: data.evaluation, "evaluated", ("validation", "test")),
    ]
    if known and len(known) < len(runs):
        recorded = {id(run) for run, _ in known}
        unrecorded = [run.name for run in runs if id(run) not in recorded]
        warnings.append(
            f"{_subject(unrecorded)} of an earlier version that did not record the training text: it is assumed to be "
            "that of the other runs"
        )
    warnings += [
        f"{run.name} is evaluated on different text after step {run.last_other_text_step}: its losses by domain before "
        "and after that step are not comparable"
        for run in runs
        if run.last_other_text_step
    ]
    warnings += [
        f"{run.name} is evaluated on {', '.join(run.partial_domains)} at only some of its steps, because its test "
        "domains were changed: these evaluations are not used"
        for run in runs
        if run.partial_domains
    ]
    changed = [run for run in runs if run.size is not None and run.size.changed]
    for run in changed:
        assert run.size is not None
        changes = ", ".join(f"{change['field']} at step {change['step']}" for change in run.size.changed)
        warnings.append(f"{run.name} was changed during training ({changes}): no single configuration reproduces it")
    return warnings


def epochs(run: Run) -> float | None:
    """Return how often a run read the text of its training domains; the maximum over domains, None if not recorded."""
    if run.size is None or run.size.data is None:
        return None
    weights = run.config.get("data", {}).get("weights")
    tokens = {
        text["domain"]: text["tokens"]
        for text in run.size.data.texts
        if text.get("split") == "train" and isinstance(text.get("tokens"), int) and text["tokens"] > 0
    }
    if not tokens:
        return None
    total = sum(tokens.values())
    shares = {name: count / total for name, count in tokens.items()}
    if weights and sum(weights.get(name, 0.0) for name in tokens) > 0:
        known = sum(weights.get(name, 0.0) for name in tokens)
        shares = {name: weights.get(name, 0.0) / known for name in tokens}
    return max(int(run.tokens[-1]) * shares[name] / tokens[name] for name in tokens)


def epoch_warnings(runs: Sequence[Run]) -> list[str]:
    """Return a sentence, without the full stop, if runs read training text more than once; empty otherwise."""
    repeated = [(run, number) for run in runs if (number := epochs(run)) is not None and number > 1.0]
    if not repeated:
        return []
    most = max(number for _, number in repeated)
    return [
        f"{_subject([run.name for run, _ in repeated])} trained on some text more than once (up to {most:.1f} times): "
        "training loss is then lower than the loss on new text of the same kind, and runs that repeat text differently "
        "should be compared at equal validation loss (--match validation)"
    ]


def _text_differences(
    known: Sequence[tuple[Run, Texts]], digest: Callable[[Texts], str], verb: str, splits: Sequence[str]
) -> list[str]:
    """Return a sentence for each run whose text differs from the most common text. The first text wins a tie."""
    counts = Counter(digest(data) for _, data in known)
    if len(counts) < 2:
        return []
    most_common_digest = max(counts, key=lambda value: counts[value])
    first, reference = next((run, data) for run, data in known if digest(data) == most_common_digest)
    return [
        f"{run.name} is {verb} on different text from {first.name}: {_describe_difference(data, reference, splits)}"
        for run, data in known
        if digest(data) != most_common_digest
    ]


def _describe_difference(data: Texts, other: Texts, splits: Sequence[str]) -> str:
    own, others = (
        {(domain["split"], domain["domain"]): domain for domain in texts.texts if domain["split"] in splits}
        for texts in (data, other)
    )
    phrases = []
    for key in dict.fromkeys([*own, *others]):
        if own.get(key) != others.get(key):
            counts = [
                f"{domains[key]['documents']:,} documents, {domains[key]['tokens']:,} tokens"
                if key in domains
                else "none"
                for domains in (own, others)
            ]
            same = "the same number of documents and tokens, but different text"
            phrases.append(f"{key[1]} ({key[0]}): {same if counts[0] == counts[1] else ' against '.join(counts)}")
    more = f"; and {len(phrases) - _MAX_LISTED} more" if len(phrases) > _MAX_LISTED else ""
    return "; ".join(phrases[:_MAX_LISTED]) + more or "its domains have a different order"


def _subject(names: Sequence[str]) -> str:
    listed = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
    return f"{listed} is" if len(names) == 1 else f"{listed} are"
