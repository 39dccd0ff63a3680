"""Losses by domain with confidence intervals, as JSON and as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from data_prep.manifest import Manifest
from megatron_ext.config.schema import STRICT
from megatron_ext.utils.markdown import table, write_report
from megatron_ext.utils.ratio_interval import FEW_DOCUMENTS, MIN_DOCUMENTS, ratio_interval

STEM = "domains"
"""Stem of the names of the output files."""

MANIFEST_SPLITS = {"validation": "validation", "test": "test", "test_in_domain": "test"}
"""Manifest split by evaluation split. Test text of a training domain has an evaluation split of its own, because
in-domain and out-of-domain test text are never summed."""

COLUMNS = (
    "domain",
    "split",
    "documents",
    "tokens",
    "nats per token",
    "{} % interval",
    "nats per byte",
    "bits per byte",
)
"""Columns of the table; `{}` is replaced by the confidence of the interval in per cent."""


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class DomainOptions:
    """Options of the evaluation by domain.

    Attributes:
        sequences: maximum windows per domain, spread evenly over it; 0: all.
        classes: also evaluate the loss by class of token.
        resamples: deprecated, without effect except for a warning. It set the draws of an earlier bootstrap.
        confidence: confidence level of the intervals, between 0 and 1.
        seed: deprecated, as `resamples`.
    """

    sequences: NonNegativeInt = 0
    classes: bool = True
    resamples: PositiveInt | None = None
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    seed: NonNegativeInt | None = None

    def warnings(self) -> list[str]:
        """Return one warning line if options without effect are set; otherwise an empty list."""
        ignored = [f"{STEM}.{name}" for name in ("resamples", "seed") if getattr(self, name) is not None]
        if not ignored:
            return []
        verb, pronoun = ("has", "it") if len(ignored) == 1 else ("have", "them")
        return [f"selectron: warning: {' and '.join(ignored)} {verb} no effect any more; remove {pronoun}"]


@dataclass(frozen=True)
class DomainLoss:
    """Loss on the text of one domain.

    Attributes:
        domain: name of the domain.
        split: split of the evaluation, a key of `MANIFEST_SPLITS`.
        documents: number of documents evaluated, in whole or in part.
        tokens: number of predicted tokens.
        loss: nats per predicted token.
        interval: confidence interval of `loss` over the choice of documents, see `ratio_variance`. It does not cover
            the variation between training runs. None: fewer than three documents.
        loss_per_byte: nats per byte of UTF-8. The bytes of first tokens that are not predicted
            (`data.reset_attention`) do not count. None: only a part of the domain was evaluated, whose number of bytes
            is unknown.
        bits_per_byte: `loss_per_byte` in bits.
        first_tokens: number of labels that are excluded with `data.reset_attention` because they begin a document.
    """

    domain: str
    split: str
    documents: int
    tokens: int
    loss: float
    interval: tuple[float, float] | None
    loss_per_byte: float | None
    bits_per_byte: float | None
    first_tokens: int = 0


def domain_losses(
    records: Sequence[dict[str, Any]],
    manifest: Manifest,
    options: DomainOptions,
    first_bytes: Callable[[int], int] | None = None,
) -> list[DomainLoss]:
    """Return the losses of an evaluation by domain with their confidence intervals.

    Args:
        records: records of `DomainEvaluator.evaluate`.
        manifest: manifest of the data.
        options: options of the evaluation.
        first_bytes: function from the index of a record to the number of bytes of text in the first tokens of that
            domain's documents. It is only called for domains whose first tokens are not predicted. None: these bytes
            are taken as 0.
    """
    return [_domain_loss(record, manifest, options, first_bytes, index) for index, record in enumerate(records)]


def _domain_loss(
    record: dict[str, Any],
    manifest: Manifest,
    options: DomainOptions,
    first_bytes: Callable[[int], int] | None,
    index: int,
) -> DomainLoss:
    nats, tokens = np.array(record["document_loss"]), np.array(record["document_tokens"], dtype=np.float64)
    (entry,) = manifest.select(MANIFEST_SPLITS[record["split"]], [record["domain"]])
    # The first token of a domain is not a label, because it has no context.
    first_tokens = record.get("first_tokens", 0)
    is_whole = record["num_tokens"] + first_tokens == entry.tokens - 1
    per_byte = None
    if is_whole:
        excluded_bytes = first_bytes(index) if first_tokens and first_bytes is not None else 0
        per_byte = record["loss"] * record["num_tokens"] / max(entry.bytes - excluded_bytes, 1)
    return DomainLoss(
        domain=record["domain"],
        split=record["split"],
        documents=len(nats),
        tokens=record["num_tokens"],
        loss=record["loss"],
        interval=ratio_interval(nats, tokens, options.confidence),
        loss_per_byte=per_byte,
        bits_per_byte=None if per_byte is None else per_byte / math.log(2),
        first_tokens=first_tokens,
    )


def write_domains(losses: Sequence[DomainLoss], options: DomainOptions, about: dict[str, Any], folder: Path) -> str:
    """Write domains.json and domains.md.

    Args:
        losses: losses by domain.
        options: options of the evaluation.
        about: description of the model for the JSON file.
        folder: an existing folder.

    Returns:
        The table in Markdown with its notes.
    """
    columns = [name.format(f"{100 * options.confidence:.6g}") for name in COLUMNS]
    lines = [*table(columns, [_cells(loss) for loss in losses]), *(f"\n{note}" for note in format_notes(losses))]
    text = "\n".join(lines) + "\n"
    write_report(
        folder, STEM, {**about, "options": _set_options(options), "domains": [asdict(loss) for loss in losses]}, text
    )
    return text


def _set_options(options: DomainOptions) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if value is not None}


def format_notes(losses: Sequence[DomainLoss]) -> list[str]:
    """Return notes for the reader on wide or missing intervals and on empty columns."""
    notes = [
        "Intervals cover the choice of documents (t, documents as clusters), not the variation between training runs."
    ]
    if without := [loss for loss in losses if loss.interval is None]:
        notes.append(f"No interval for fewer than {MIN_DOCUMENTS} documents: {_names(without)}.")
    if few := [loss for loss in losses if loss.interval is not None and loss.documents < FEW_DOCUMENTS]:
        notes.append(f"Fewer than {FEW_DOCUMENTS} documents, so intervals are rough: {_names(few)}.")
    if partial := [loss for loss in losses if loss.bits_per_byte is None]:
        reason = "only a part was evaluated, and bytes are known only for the whole; domains.sequences=0 evaluates all"
        notes.append(f"No values per byte for {_names(partial)}: {reason}.")
    return notes


def _names(losses: Sequence[DomainLoss]) -> str:
    return ", ".join(f"{loss.domain} ({loss.split})" for loss in losses)


def _cells(loss: DomainLoss) -> list[str]:
    interval = "" if loss.interval is None else "{:.4f} to {:.4f}".format(*loss.interval)
    per_byte = ["" if value is None else f"{value:.4f}" for value in (loss.loss_per_byte, loss.bits_per_byte)]
    counts = [f"{loss.documents:,}", f"{loss.tokens:,}"]
    return [loss.domain, loss.split, *counts, f"{loss.loss:.4f}", interval, *per_byte]
