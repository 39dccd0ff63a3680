"""Losses by class of token with confidence intervals, as JSON and as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megatron_ext.analysis.token_classes import (
    SCORE_EARLY,
    SCORE_LATE,
    STEM,
    ClassesRecord,
    ClassLosses,
    class_losses,
)
from megatron_ext.utils.markdown import table, write_report
from megatron_ext.utils.ratio_interval import ratio_interval

SCORE = "in-context score"
"""Name of the row of in-context scores."""

_FIELDS = ("step", "domain", "split", "documents", "classes")
"""Fields of an evaluation's record that token_classes.json repeats, by document, for comparisons."""


@dataclass(frozen=True)
class ClassLoss:
    """Loss of a class of tokens on the text of one domain.

    Attributes:
        domain: name of the domain.
        split: split of the evaluation.
        name: name of the class, `group/class`, or `in-context score`.
        documents: number of documents with tokens of the class.
        tokens: number of its tokens.
        share: fraction of the domain's predicted tokens.
        loss: nats per token; of the in-context score: difference of losses.
        interval: confidence interval of `loss` over the choice of documents; None: fewer than three documents.
    """

    domain: str
    split: str
    name: str
    documents: int
    tokens: int
    share: float
    loss: float
    interval: tuple[float, float] | None


def summarize(records: Sequence[dict[str, Any]], confidence: float) -> list[ClassLoss]:
    """Return the losses by class of an evaluation, domain by domain.

    Args:
        records: records of `DomainEvaluator.evaluate`. Those without classes are skipped.
        confidence: confidence level of the intervals, between 0 and 1.
    """
    found = []
    for record, parsed in zip(records, TypeAdapter(list[ClassesRecord]).validate_python(records), strict=True):
        if not parsed.classes:
            continue
        (losses,), total = class_losses([parsed], STEM), record["num_tokens"]
        found += [_class_loss(losses, name, total, confidence) for name in losses.names]
        found += _score(losses, total, confidence)
    return found


def _class_loss(losses: ClassLosses, name: str, total: int, confidence: float) -> ClassLoss:
    tokens, nats = losses.of(name)
    present, count = tokens > 0, int(tokens.sum())
    interval = ratio_interval(nats, tokens.astype(float), confidence)
    return ClassLoss(
        losses.domain,
        losses.split,
        name,
        int(present.sum()),
        count,
        count / total,
        float(nats.sum()) / count,
        interval,
    )


def _score(losses: ClassLosses, total: int, confidence: float) -> list[ClassLoss]:
    found = losses.in_context_score()
    if found is None:
        return []
    value, spread = found
    half = float(spread.half_width(confidence))
    tokens = [losses.of(name)[0] for name in (SCORE_EARLY, SCORE_LATE)]
    documents, count = int(((tokens[0] > 0) & (tokens[1] > 0)).sum()), int(tokens[0].sum() + tokens[1].sum())
    interval = None if math.isnan(half) else (value - half, value + half)
    return [ClassLoss(losses.domain, losses.split, SCORE, documents, count, count / total, value, interval)]


def write_classes(records: Sequence[dict[str, Any]], confidence: float, about: dict[str, Any], folder: Path) -> str:
    """Write token_classes.json and token_classes.md.

    Args:
        records: records of `DomainEvaluator.evaluate` with classes.
        confidence: confidence level of the intervals, between 0 and 1.
        about: description of the model for the JSON file.
        folder: an existing folder.

    Returns:
        Table of losses in Markdown, a row per class and a column per domain.
    """
    losses = summarize(records, confidence)
    domains = list(dict.fromkeys((loss.domain, loss.split) for loss in losses))
    groups = list(dict.fromkeys(_group(loss.name) for loss in losses))
    names = sorted(dict.fromkeys(loss.name for loss in losses), key=lambda name: groups.index(_group(name)))
    cells = {(loss.name, loss.domain, loss.split): f"{loss.loss:.4f} ({_percent(loss.share)})" for loss in losses}
    columns = ["class of token", *(f"{domain} ({split})" for domain, split in domains)]
    rows = [[name, *(cells.get((name, *domain), "") for domain in domains)] for name in names]
    note = "Nats per token (share of the domain's tokens). A token may have a class of each group."
    text = "\n".join([*table(columns, rows), "", note]) + "\n"
    numbers = {
        **about,
        "confidence": confidence,
        "losses": [asdict(loss) for loss in losses],
        "records": [{field: record[field] for field in _FIELDS if field in record} for record in records],
    }
    write_report(folder, STEM, numbers, text)
    return text


def _group(name: str) -> str:
    return name.partition("/")[0]


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"
