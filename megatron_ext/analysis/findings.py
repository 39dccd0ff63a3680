"""Sentences about a comparison at matched loss: verdicts, seeds, and warnings about the evaluations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_ext.analysis.cells import number, signed
from megatron_ext.analysis.claims import findings
from megatron_ext.analysis.matched import NORMAL_POWER, RESOLUTION, Comparison, Measurement
from megatron_ext.analysis.matched_runs import Match, loss_to_match
from megatron_ext.analysis.run_files import FloatArray

MATCHED: dict[Match, str] = {"training": "training loss", "validation": "in-domain validation loss"}
"""Name of the matched loss in a sentence."""


def verdicts(comparison: Comparison) -> list[dict[str, str]]:
    """Return, for each architecture with a baseline, how its out-of-domain loss compares with the baseline's.

    Returns:
        Mappings from `_entry`, with `verdict` (`higher`, `lower`, `same` or `unknown`) by the interval that holds for
        all gaps at once, if there are several.
    """
    return [
        _entry(comparison, measured) | {"verdict": _verdict(*comparison.verdict_interval(measured))}
        for measured in comparison.compared("test")
    ]


def claim_entries(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the claims of the study that are about compared architectures.

    Returns:
        Mappings with `words` of the claim and `entries`, the mappings from `_entry` with the `answer` for each
        architecture.
    """
    by_claim: dict[str, list[dict[str, str]]] = {}
    for finding in findings(comparison):
        entry = _entry(comparison, finding.measured) | {"answer": finding.answer}
        by_claim.setdefault(finding.claim.words, []).append(entry)
    return [{"words": words, "entries": entries} for words, entries in by_claim.items()]


def _entry(comparison: Comparison, measured: Measurement) -> dict[str, str]:
    """Describe the out-of-domain gap of an architecture at its headline.

    Returns:
        Mapping with `label`, `baseline`, `at` (the matched loss), `gap`, `interval`, `family` (interval for all gaps at
        once, empty for a single gap), `detectable` (smallest gap that would be detected), `also` (other settings that
        differ) and `seeds` (numbers of seeds of both).
    """
    at, gap = comparison.headlines[measured.architecture], measured.gap
    also = {label: words for group in comparison.groups for label, words in group.also_differs.items()}
    seeds = {architecture.label: len(architecture.runs) for architecture in comparison.architectures}
    family = comparison.family.get(measured.architecture)
    low, high = comparison.verdict_interval(measured)
    detectable = float((high - low) / 2 + NORMAL_POWER * gap.error[at])
    return {
        "label": measured.architecture,
        "baseline": measured.baseline,
        "at": number(comparison.matched_losses[at]).text,
        "gap": signed(gap.value[at]).text,
        "interval": interval_text(gap.low[at], gap.high[at]),
        "family": interval_text(*family) if family else "",
        "detectable": number(detectable).text,
        "also": ", ".join(also.get(measured.architecture, ())),
        "seeds": f"{seeds[measured.architecture]} and {seeds[measured.baseline]}",
    }


def summary_lines(comparison: Comparison) -> list[str]:
    """Return a summary of the comparison for the terminal, in lines."""
    num_runs = sum(len(architecture.runs) for architecture in comparison.architectures)
    architectures = f"{num_runs} runs of {len(comparison.architectures)} architectures"
    if len(comparison.architectures) == 1:
        lines = [f"compared: {architectures}, with {comparison.baseline.label}"]
        return [*lines, "one architecture: there is nothing to compare it with"]
    name = MATCHED[comparison.match]
    lines = [f"compared: {architectures}, at the lowest {name} that an architecture and its baseline both reached"]
    lines += describe_unmatched(comparison)
    entries = verdicts(comparison)
    if entries:
        lines.append("out-of-domain loss, nats per token:")
    for entry in entries:
        words = {"same": "no significant difference", "unknown": "unknown difference"}
        verdict = words.get(entry["verdict"], f"{entry['verdict']} loss")
        precision = f"95 % interval {entry['interval']}" if entry["interval"] else "no interval: fewer than 3 documents"
        precision += f", {entry['family']} for all gaps at once" if entry["family"] else ""
        pair = f"{entry['label']} against {entry['baseline']} at {entry['at']}"
        lines.append(f"  {pair}: {verdict} ({entry['gap']}, {precision})")
    return [*lines, describe_seeds(comparison)] if entries else lines


def describe_seeds(comparison: Comparison) -> str:
    """Say whether the intervals include seeds, and by how much seeds differ, as a sentence without the full stop."""
    noise = comparison.seed_noise
    if noise is None:
        return (
            "Every architecture has one seed, so the intervals do not include the choice of a seed, and how much seeds "
            "differ is not known from these runs; train one more with another training.seed"
        )
    single = [a.label for a in comparison.architectures if len(a.runs) == 1]
    degrees = "1 degree" if noise.degrees_of_freedom == 1 else f"{noise.degrees_of_freedom} degrees"
    deviation = f"a standard deviation of {noise.deviation:.4f} nats between seeds ({degrees} of freedom)"
    known = f"single runs differ by {deviation}"
    if not single:
        return f"The intervals include the choice of seeds: {known}"
    subject = ", ".join(single[:3]) + (", ..." if len(single) > 3 else "")
    verb = "has" if len(single) == 1 else "have"
    assumed = f"{subject} {verb} one seed, for which the same spread is assumed"
    return f"The intervals include the choice of seeds: {known}; {assumed}"


def density_warning(comparison: Comparison) -> str:
    """Say, as a sentence without the full stop, if curves are less certain between evaluations than `RESOLUTION`.

    With several seeds the error of the curves is part of that of the seeds, and nothing is said.
    """
    if comparison.seed_noise is not None:
        return ""
    found = [
        (float(measured.curve_error[at]), _evaluation_distance(comparison, measured.architecture, at))
        for measured in comparison.compared("test")
        if measured.curve_error[at := comparison.headlines[measured.architecture]] > RESOLUTION
    ]
    if not found:
        return ""
    errors, distances = zip(*found, strict=True)
    gaps = "the gap" if len(comparison.compared("test")) == 1 else f"{len(found)} gaps"
    return (
        f"Evaluations near the matched losses are {_span(distances)} nats of {MATCHED[comparison.match]} apart, and "
        f"single evaluations scatter; this alone gives {gaps} a standard error of {_span(errors)}, more than the "
        f"{RESOLUTION} that the study resolves: evaluate more often (training.evaluate_every), or train more seeds"
    )


def _span(values: Sequence[float]) -> str:
    low, high = number(min(values)).text, number(max(values)).text
    return low if low == high else f"{low} to {high}"


def _evaluation_distance(comparison: Comparison, label: str, at: int) -> float:
    """Return the largest distance in matched loss between the evaluations around a point, over a pair's runs."""
    group = next(group for group in comparison.groups if label in {other.label for other in group.others})
    other = next(other for other in group.others if other.label == label)
    level, distances = comparison.matched_losses[at], []
    for run in (*group.baseline.runs, *other.runs):
        x = loss_to_match(run, comparison.match, comparison.window)
        above, below = x[x >= level], x[x <= level]
        nearest = float(above.min()) - float(below.max())
        distances.append(nearest or float(sorted(abs(x - level))[min(1, len(x) - 1)]))
    return max(distances)


def _verdict(low: float, high: float) -> str:
    """Return `higher` or `lower` by the sign of a gap's interval, `same` if it contains zero, else `unknown`."""
    if math.isnan(low):
        return "unknown"
    if low > 0:
        return "higher"
    return "lower" if high < 0 else "same"


def interval_text(low: float, high: float) -> str:
    """Format the interval of a gap; empty with too few documents."""
    return "" if math.isnan(low) else f"{signed(low).text} to {signed(high).text}"


def describe_unmatched(comparison: Comparison) -> list[str]:
    """Describe the architectures that have no loss in common with their baseline.

    Returns:
        A sentence without the full stop for each.
    """
    name = MATCHED[comparison.match]
    sentences = []
    for group in comparison.groups:
        for other in (other for other in group.others if other.label not in comparison.headlines):
            runs = [*group.baseline.runs, *other.runs]
            losses = [(run, loss_to_match(run, comparison.match, comparison.window)) for run in runs]
            highest, highest_losses = max(losses, key=lambda pair: float(pair[1].min()))
            lowest, lowest_losses = min(losses, key=lambda pair: float(pair[1].max()))
            sentences.append(
                f"{other.label} and {group.baseline.label} have no {name} in common, so they are not compared: "
                f"{highest.name} was evaluated at {name}es of {_range(highest_losses)}, "
                f"{lowest.name} at {_range(lowest_losses)}; "
                f"train {highest.name} longer, or evaluate {lowest.name} earlier"
            )
    return sentences


def _range(losses: FloatArray) -> str:
    return f"{number(float(losses.max())).text} to {number(float(losses.min())).text}"
