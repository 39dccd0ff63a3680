"""Recorded losses of a run by class of token, domain and document; `docs/token_classes.md` defines the classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from megatron_ext.analysis.run_files import FloatArray, IntArray, Split, parse_lines
from megatron_ext.run_folder.layout import EVALUATION, EVALUATIONS, parse_step_name, step_name
from megatron_ext.utils.atomic_files import read_regular
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.ratio_interval import SamplingVariance, ratio_variance

STEM = "token_classes"
"""Stem of the names of the files that the suite `domains` writes."""

SCORE_EARLY, SCORE_LATE = "score/50", "score/2000"
"""Classes whose losses make up the in-context score: tokens about positions 50 and 2,000 of the context."""

_HINT = "restore the file, or evaluate the run again"
_RECORD = ConfigDict(extra="ignore")


@checked_dataclass(frozen=True, config=_RECORD)
class ClassRecord:
    """Sums of nats and numbers of tokens of one class, by document in the order of the evaluation's record."""

    document_loss: list[FiniteFloat]
    document_tokens: list[NonNegativeInt]


@checked_dataclass(frozen=True, config=_RECORD)
class ClassesRecord:
    """Fields of an evaluation's record, one domain at one step, that are used here. `classes` is often missing."""

    step: NonNegativeInt
    domain: str
    split: Split
    documents: Annotated[list[int], Field(min_length=1)]
    classes: dict[str, ClassRecord] | None = None


@checked_dataclass(frozen=True, config=_RECORD)
class ClassesFile:
    """Fields of token_classes.json that are used here."""

    records: list[ClassesRecord]


@dataclass(frozen=True)
class ClassLosses:
    """Losses of one domain at one step, by class of token and document.

    Attributes:
        step: optimizer step.
        split: `validation`, `test` or `test_in_domain`.
        domain: name of the domain.
        names: names of the C classes, `group/class`. A token may have a class of each group.
        documents: int64 [D], document ids in ascending order; the same for all classes.
        tokens: int64 [C, D], predicted tokens.
        nats: float64 [C, D], sum of their losses.
    """

    step: int
    split: Split
    domain: str
    names: tuple[str, ...]
    documents: IntArray
    tokens: IntArray
    nats: FloatArray

    def of(self, name: str) -> tuple[IntArray, FloatArray]:
        """Return tokens and nats of a class by document, int64 [D] and float64 [D]; 0 for a class without tokens."""
        if name not in self.names:
            return np.zeros(len(self.documents), dtype=np.int64), np.zeros(len(self.documents))
        index = self.names.index(name)
        return self.tokens[index], self.nats[index]

    def in_context_score(self) -> tuple[float, SamplingVariance] | None:
        """Return the loss about token 2,000 less that about token 50 in nats, and its spread over documents.

        The differences of the documents are weighted by their tokens about position 50, whose number is proportional to
        that of the windows. None: no document is long enough.
        """
        (early_tokens, early_nats), (late_tokens, late_nats) = (self.of(name) for name in (SCORE_EARLY, SCORE_LATE))
        is_long = (early_tokens > 0) & (late_tokens > 0)
        if not is_long.any():
            return None
        weights = early_tokens[is_long].astype(np.float64)
        differences = weights * late_nats[is_long] / late_tokens[is_long] - early_nats[is_long]
        return float(differences.sum() / weights.sum()), ratio_variance(differences, weights)


def read_class_losses(run: Path) -> list[ClassLosses]:
    """Read the losses by class that a run recorded while it trained, in the order of step, split and domain.

    Evaluations without classes (see `training.evaluate_classes`) are skipped. Of repeated evaluations the last counts.

    Args:
        run: run folder.

    Raises:
        UserError: evaluation.jsonl is missing or cannot be read, or a line is invalid.
    """
    hint = "train with training.evaluate_every above 0"
    lines = parse_lines(run / EVALUATION, ClassesRecord, hint)
    return _sorted([_class_losses(line.record, line.where) for line in lines if line.record.classes])


def read_evaluated_class_losses(run: Path, step: int | None = None) -> list[ClassLosses]:
    """Read the losses by class that `selectron evaluate --suite domains` wrote to a run folder, by split and domain.

    Args:
        run: run folder.
        step: step of the checkpoint; None: the newest with such results.

    Returns:
        Losses of each domain; empty if there are no results.

    Raises:
        UserError: the file cannot be read or is invalid.
    """
    folder = run / EVALUATIONS
    steps = [parse_step_name(path.parent.name) for path in folder.glob(f"*/{STEM}.json")]
    present = {found for found in steps if found is not None}
    chosen = max(present, default=None) if step is None else step
    if chosen is None or chosen not in present:
        return []
    return read_classes_file(folder / step_name(chosen) / f"{STEM}.json")


def read_classes_file(path: Path) -> list[ClassLosses]:
    """Read a token_classes.json; as `read_evaluated_class_losses`."""
    try:
        content = TypeAdapter(ClassesFile).validate_json(read_regular(path))
    except (OSError, ValidationError):
        raise UserError(str(path), "cannot be read", _HINT) from None
    return class_losses(content.records, str(path))


def class_losses(records: Sequence[ClassesRecord], where: str) -> list[ClassLosses]:
    """Convert records to arrays; those without classes are skipped.

    Args:
        records: records of an evaluation.
        where: their file, for messages.

    Raises:
        UserError: lists of documents, losses and tokens differ in length.
    """
    return _sorted([_class_losses(record, where) for record in records if record.classes])


def _class_losses(record: ClassesRecord, where: str) -> ClassLosses:
    classes = record.classes or {}
    sizes = {len(values) for found in classes.values() for values in (found.document_loss, found.document_tokens)}
    if sizes != {len(record.documents)}:
        raise UserError(where, "documents, document_loss and document_tokens of a class differ in length", _HINT)
    order = np.argsort(record.documents)
    return ClassLosses(
        step=record.step,
        split=record.split,
        domain=record.domain,
        names=tuple(classes),
        documents=np.array(record.documents, dtype=np.int64)[order],
        tokens=np.array([found.document_tokens for found in classes.values()], dtype=np.int64)[:, order],
        nats=np.array([found.document_loss for found in classes.values()], dtype=np.float64)[:, order],
    )


def _sorted(found: Sequence[ClassLosses]) -> list[ClassLosses]:
    unique = {(losses.step, losses.split, losses.domain): losses for losses in found}
    return [unique[key] for key in sorted(unique)]


def loss(tokens: IntArray, nats: FloatArray) -> float:
    """Return the loss in nats per token; NaN without tokens."""
    total = int(tokens.sum())
    return float(nats.sum()) / total if total else math.nan
