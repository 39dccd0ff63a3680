"""Files of a run folder, parsed and checked: config.yaml, metrics.jsonl, evaluation.jsonl, model.json, sweep.json."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic_core import ErrorDetails
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from megatron_ext.config.yaml_text import TooLargeError, parse_yaml
from megatron_ext.run_folder.layout import CONFIG, SWEEP
from megatron_ext.utils.atomic_files import os_error_reason, read_regular
from megatron_ext.utils.credentials import redact_tree
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.printable import printable

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Split = Literal["test", "validation", "test_in_domain"]
Record = TypeVar("Record")

SPLITS: dict[Split, str] = {"test": "out of domain", "validation": "in domain", "test_in_domain": "in domain test"}
"""Names of the splits in reports, in the order of display."""


LOSS_TOLERANCE = 1e-3
"""Allowed relative difference between a domain's loss and the mean over its documents. It covers only the order of
summation and fp32 rounding."""


_LINE = ConfigDict(extra="ignore", strict=True)


_INT64 = Field(lt=1 << 63, ge=-(1 << 63))
"""Constraint to the range of int64 arrays."""


@checked_dataclass(frozen=True, config=_LINE)
class StepRecord:
    """Line of metrics.jsonl with the fields that are used here.

    `loss` is in nats per token, `tokens` counts all training tokens since the start of the run, `mfu` is a fraction of
    the device's peak, and `peak_memory` is in bytes.
    """

    step: Annotated[PositiveInt, _INT64]
    tokens: Annotated[NonNegativeInt, _INT64]
    loss: FiniteFloat
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_memory: Annotated[NonNegativeInt, _INT64] | None = None


@checked_dataclass(frozen=True, config=_LINE)
class EvaluationRecord:
    """Line of evaluation.jsonl: one domain at one step.

    `loss` is in nats per token, `document_loss` is the sum of nats of each document. `data` is the prefix of a digest
    of all evaluated text; None: written by a version that did not record it.
    """

    step: Annotated[NonNegativeInt, _INT64]
    domain: Annotated[str, Field(min_length=1)]
    split: Split
    loss: FiniteFloat
    num_tokens: Annotated[PositiveInt, _INT64]
    documents: Annotated[list[Annotated[int, _INT64]], Field(min_length=1)]
    document_loss: list[FiniteFloat]
    document_tokens: list[Annotated[NonNegativeInt, _INT64]]
    data: str | None = None


@checked_dataclass(frozen=True, config=_LINE)
class Texts:
    """Digests of a run's training and evaluation text, and a summary of each domain (split, domain, documents, ...)."""

    train: str
    evaluation: str
    texts: list[dict[str, Any]]


@checked_dataclass(frozen=True, config=_LINE)
class ModelSize:
    """Contents of model.json: number of parameters of the whole model, of its embeddings and of its output layer.

    `data` is the text of the run; None: written by a version that did not record it. `changed` lists the configuration
    changes that were permitted when the run was resumed: step, field, old and new value of each.
    """

    parameters: PositiveInt
    embedding_parameters: NonNegativeInt
    output_layer_parameters: NonNegativeInt
    data: Texts | None = None
    changed: list[dict[str, Any]] = Field(default_factory=list)


@checked_dataclass(frozen=True, config=_LINE)
class SweepRecord:
    """Contents of sweep.json: names of the runs, and fields of which the best value is chosen by validation loss."""

    runs: list[str] = Field(default_factory=list)
    chosen: list[str] = Field(default_factory=list)


@dataclass(frozen=True)
class Line(Generic[Record]):
    """Parsed line with its location (file and line number), which later error messages need."""

    where: str
    record: Record


@dataclass(frozen=True)
class DomainEvaluations:
    """Losses of one domain over all evaluations of a run.

    Attributes:
        split: `validation` (in domain, held out), `test` (out of domain) or `test_in_domain` (test text, in domain).
        domain: name of the domain.
        documents: int64 [D], document ids in ascending order.
        tokens: int64 [D], tokens of each document.
        losses: float64 [E, D], sum of nats over each document's tokens at each evaluation.
    """

    split: Split
    domain: str
    documents: IntArray
    tokens: IntArray
    losses: FloatArray


def column_name(split: Split) -> str:
    """Return the name of a split in CSV files."""
    return SPLITS[split].replace(" ", "_")


def _warn(where: str, message: str) -> None:
    print(printable(f"warning: {where}: {message}"), file=sys.stderr)


def _read_bytes(path: Path, hint: str) -> bytes:
    try:
        return read_regular(path)
    except FileNotFoundError:
        raise UserError(str(path), "is missing", hint) from None
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({os_error_reason(error)})", hint) from None


def read_config(path: Path) -> dict[str, Any]:
    """Read config.yaml as plain mappings and check presence and type of the fields that identify a run."""
    file = path / CONFIG
    data = _read_bytes(file, "give the folder of a run: it contains config.yaml, metrics.jsonl and evaluation.jsonl")
    hint = "restore the configuration that was saved with the run"
    try:
        config = redact_tree(parse_yaml(data.decode("utf-8")))
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{file}{line}", f"is not YAML ({error.problem})", hint) from None
    except TooLargeError as error:
        raise UserError(str(file), f"is too large for a configuration ({error})", hint) from None
    except (YAMLError, ValueError, RecursionError):
        raise UserError(str(file), "is not YAML", hint) from None
    required = (("model", "pattern", str), ("training", "seed", int), ("run", "name", str), ("training", "steps", int))
    for section, key, kind in required:
        values = config.get(section) if isinstance(config, dict) else None
        if not isinstance(values, dict) or not isinstance(values.get(key), kind):
            raise UserError(str(file), f"has no {section}.{key}", hint)
    return config


def read_size(path: Path) -> ModelSize | None:
    """Read model.json; None if it does not exist. Raises a `UserError` if it is invalid or cannot be read."""
    return _read_json(path, ModelSize, "restore the file or resume the run, which rewrites it")


def read_sweep_record(folder: Path) -> SweepRecord:
    """Read sweep.json in a folder of runs; it is empty if it does not exist.

    Raises:
        UserError: the file is invalid or cannot be read.
    """
    hint = "repeat `selectron sweep`, which writes it again, or remove it"
    return _read_json(folder / SWEEP, SweepRecord, hint) or SweepRecord()


def _read_json(path: Path, kind: type[Record], hint: str) -> Record | None:
    if not path.exists():
        return None
    try:
        return TypeAdapter(kind).validate_json(_read_bytes(path, hint))
    except ValidationError as error:
        raise UserError(str(path), _describe_error(error.errors(include_url=False)[0]), hint) from None


def parse_lines(path: Path, kind: type[Record], hint: str) -> Iterator[Line[Record]]:
    """Yield the lines of a JSON-lines file as records of type `kind`.

    Args:
        path: the file.
        kind: pydantic dataclass of a line.
        hint: hint for the user if the file cannot be read.

    Raises:
        UserError: the file cannot be read, or a line is invalid. An incomplete last line is skipped with a warning.
    """
    adapter = TypeAdapter(kind)
    lines = _read_bytes(path, hint).split(b"\n")
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield Line(where, adapter.validate_json(text))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            # A last line without a newline was cut off when the writer was killed.
            if first["type"] == "json_invalid" and number == len(lines):
                _warn(where, "incomplete last line ignored")
                continue
            raise UserError(where, _describe_error(first), "restore the file or repeat the run") from None


def _describe_error(first: ErrorDetails) -> str:
    """Describe the first validation error of pydantic."""
    field = ".".join(str(part) for part in first["loc"])
    is_malformed = first["type"] == "json_invalid" or not field
    return "is not a JSON object" if is_malformed else f"{field}: {first['msg'].lower()}"


def read_metrics(path: Path) -> list[StepRecord]:
    """Read the steps of a run in ascending order. If a step was written twice, the later line counts."""
    by_step = {line.record.step: line.record for line in parse_lines(path, StepRecord, "give the folder of a run")}
    if not by_step:
        raise UserError(str(path), "contains no step", "train the run first")
    return [by_step[step] for step in sorted(by_step)]


@dataclass(frozen=True)
class _DomainScores:
    """Evaluation of a domain by document: unique ids in ascending order, tokens and summed nats."""

    where: str
    documents: IntArray
    tokens: IntArray
    losses: FloatArray


def _check_scores(line: Line[EvaluationRecord]) -> _DomainScores:
    record = line.record
    hint = "restore the file or repeat the run"
    if not len(record.documents) == len(record.document_loss) == len(record.document_tokens):
        raise UserError(line.where, "documents, document_loss and document_tokens differ in length", hint)
    # A document that was scored in several parts counts as one, because its parts are not independent samples.
    documents, index = np.unique(np.array(record.documents, dtype=np.int64), return_inverse=True)
    tokens = np.bincount(index, weights=record.document_tokens).astype(np.int64)
    losses = np.bincount(index, weights=record.document_loss).astype(np.float64)
    if tokens.sum() != record.num_tokens:
        raise UserError(line.where, f"num_tokens {record.num_tokens} but its documents have {tokens.sum()}", hint)
    mean = losses.sum() / tokens.sum()
    if abs(mean - record.loss) > LOSS_TOLERANCE * max(1.0, abs(mean)):
        raise UserError(line.where, f"loss {record.loss:.6g} but its documents give {mean:.6g}", hint)
    return _DomainScores(line.where, documents, tokens, losses)


@dataclass(frozen=True)
class Evaluations:
    """Evaluations at steps with a known training loss; the fields are those of `Run`."""

    steps: IntArray
    domains: tuple[DomainEvaluations, ...] = ()
    last_other_text_step: int = 0
    partial_domains: tuple[str, ...] = ()


def read_evaluations(path: Path, steps: IntArray, *, needed: bool) -> Evaluations:
    """Read evaluation.jsonl.

    Args:
        path: the file.
        steps: int64 [S], steps of metrics.jsonl. Evaluations at other steps are skipped with a warning.
        needed: True if at least one evaluation is required.

    Raises:
        UserError: the file cannot be read, a line is invalid, or a required evaluation is missing.
    """
    if not needed and not path.exists():
        return Evaluations(np.empty(0, dtype=np.int64))
    hint = "train with training.evaluate_every above 0"
    by_step: dict[int, dict[tuple[Split, str], _DomainScores]] = {}
    texts: dict[int, str | None] = {}
    for line in parse_lines(path, EvaluationRecord, hint):
        key = (line.record.split, line.record.domain)
        by_step.setdefault(line.record.step, {})[key] = _check_scores(line)
        texts[line.record.step] = line.record.data
    by_step.pop(0, None)  # before the first step there is no training loss to compare at
    _drop_incomplete(path, by_step, texts)
    for step in sorted(set(by_step) - set(steps.tolist())):
        _warn(str(path), f"evaluation at step {step} ignored: metrics.jsonl has no such step")
        del by_step[step]
    if not by_step:
        if needed:
            raise UserError(str(path), "contains no evaluation after a training step", hint)
        return Evaluations(np.empty(0, dtype=np.int64))
    order = sorted(by_step)
    keys = sorted(set.intersection(*(set(scores) for scores in by_step.values())))
    partial_domains = sorted({key for scores in by_step.values() for key in scores} - set(keys))
    names = tuple(f"{domain} ({split})" for split, domain in partial_domains)
    if names:
        problem = "not used, because only some evaluations have it: data.test_domains was changed during the run"
        _warn(str(path), f"{', '.join(names)} {problem}")
    domains = tuple(_stack_scores(key, [by_step[step][key] for step in order]) for key in keys)
    newest = texts[order[-1]]
    # The digest covers all domains, so it can be compared only between evaluations of the same domains.
    comparable = [step for step in order if by_step[step].keys() == by_step[order[-1]].keys()]
    on_other_text = [step for step in comparable if texts[step] not in (None, newest)] if newest is not None else []
    return Evaluations(np.array(order, dtype=np.int64), domains, max(on_other_text, default=0), names)


def _drop_incomplete(path: Path, by_step: dict[int, Any], texts: Mapping[int, str | None]) -> None:
    """Drop the last evaluation if it was interrupted between two domains; missing domains elsewhere are an error.

    Evaluations on other text may have other domains, because test domains may be changed when a run is resumed. If the
    last evaluation is the only one on its text, there is none to compare it with. It then counts as interrupted if its
    domains are a strict subset of those of the previous evaluation.
    """
    last = max(by_step, default=0)
    for step in sorted(by_step):
        peers = [other for other in by_step if texts[other] == texts[step]]
        earlier = [other for other in by_step if other < step]
        if step == last and peers == [step] and earlier and by_step[step].keys() < by_step[max(earlier)].keys():
            peers = [max(earlier)]
        keys = sorted({key for peer in peers for key in by_step[peer]})
        missing = [f"{domain} ({split})" for split, domain in keys if (split, domain) not in by_step[step]]
        if not missing:
            continue
        if step != last:
            problem = f"the evaluation at step {step} lacks {', '.join(missing)}"
            raise UserError(str(path), problem, "restore the file or repeat the run")
        _warn(str(path), f"evaluation at step {step} ignored: it was interrupted before {', '.join(missing)}")
        del by_step[step]


def _stack_scores(key: tuple[Split, str], scores: Sequence[_DomainScores]) -> DomainEvaluations:
    first = scores[0]
    for other in scores[1:]:
        if not same_documents(first.documents, first.tokens, other.documents, other.tokens):
            problem = f"domain {key[1]} has other documents than at {first.where}"
            raise UserError(other.where, problem, "evaluate a run on the same data at every step")
    losses = np.stack([score.losses for score in scores])
    return DomainEvaluations(*key, documents=first.documents, tokens=first.tokens, losses=losses)


def same_documents(documents: IntArray, tokens: IntArray, other_documents: IntArray, other_tokens: IntArray) -> bool:
    """Return True if both evaluations have the same document ids and the same tokens of each document."""
    return np.array_equal(documents, other_documents) and np.array_equal(tokens, other_tokens)
