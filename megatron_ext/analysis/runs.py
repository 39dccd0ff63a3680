"""Reading and validation of run folders: config.yaml, metrics.jsonl, evaluation.jsonl and model.json."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic_core import ErrorDetails
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from megatron_ext.config.yaml_text import TooLargeError, parse_yaml
from megatron_ext.run_folder.layout import CONFIG, EVALUATION, METRICS, MODEL
from megatron_ext.utils.atomic_files import os_reason, read_regular
from megatron_ext.utils.credentials import redacted_tree
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


@dataclass(frozen=True)
class Run:
    """Contents of a run folder.

    Attributes:
        path: the folder.
        name: run.name of the configuration.
        config: the configuration as plain mappings and values.
        seed: training.seed of the configuration.
        steps: int64 [S], optimizer steps in ascending order.
        tokens: int64 [S], training tokens up to and including each step.
        losses: float64 [S], training loss of each step's batch in nats per token.
        tokens_per_second: float64 [S], NaN where not recorded.
        evaluation_steps: int64 [E], steps after which the run was evaluated, in ascending order.
        domains: evaluated domains in the order of split and name; the same in every run of a comparison.
        size: number of parameters of the model; None if not recorded.
        peak_memory: maximum over the steps in bytes; None if not recorded.
        mfu: median model FLOPs utilization; None if not recorded.
        other_text_until: last step that was evaluated on other text than the newest evaluation; 0 if there is none.
        left_out: domains that only some evaluations have, because data.test_domains was changed during the run.
    """

    path: Path
    name: str
    config: Mapping[str, Any]
    seed: int
    steps: IntArray
    tokens: IntArray
    losses: FloatArray
    tokens_per_second: FloatArray
    evaluation_steps: IntArray
    domains: tuple[DomainEvaluations, ...]
    size: ModelSize | None = None
    peak_memory: int | None = None
    mfu: float | None = None
    other_text_until: int = 0
    left_out: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Total time of the optimizer steps in seconds; NaN if the time of any step is unknown."""
        return float((np.diff(self.tokens, prepend=0) / self.tokens_per_second).sum())

    @property
    def pattern(self) -> str:
        """Value of model.pattern without white space."""
        return "".join(self.config["model"]["pattern"].split())

    def split(self, split: Split) -> tuple[DomainEvaluations, ...]:
        """Return the domains of a split."""
        return tuple(domain for domain in self.domains if domain.split == split)


def column_name(split: Split) -> str:
    """Return the name of a split in CSV files."""
    return SPLITS[split].replace(" ", "_")


def read_runs(paths: Sequence[Path], *, evaluated: bool = True) -> list[Run]:
    """Read run folders for a comparison.

    Args:
        paths: run folders, or folders of run folders.
        evaluated: True if every run must have evaluations, including out-of-domain ones.

    Raises:
        UserError: no folder or the same folder twice is given, `read_run` rejects a folder, runs are trained or
            evaluated on different data, or a required evaluation is missing.
    """
    if not paths:
        raise UserError("RUN", "no run folder given", "give at least one")
    folders = [folder for path in paths for folder in run_folders(path)]
    resolved = [path.resolve() for path in folders]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise UserError(str(folders[index]), "is given twice", "give every run folder once")
    runs = _without_left_out([read_run(path, evaluated=evaluated) for path in folders])
    first = next((run for run in runs if run.domains), runs[0])
    for run in runs:
        check_same_data(run, first)
    if evaluated and not runs[0].split("test"):
        where = str(runs[0].path / EVALUATION)
        raise UserError(where, "has no out-of-domain (split test) evaluation", "train with data.test_domains")
    return runs


def _without_left_out(runs: list[Run]) -> list[Run]:
    """Remove from all runs the domains that some run evaluated in only some of its evaluations."""
    names = {name for run in runs for name in run.left_out}
    return [
        replace(run, domains=tuple(one for one in run.domains if f"{one.domain} ({one.split})" not in names))
        for run in runs
    ]


def run_folders(path: Path) -> list[Path]:
    """Return the run folders in a folder, sorted by name; the folder itself if it is a run folder or has none."""
    if (path / CONFIG).exists() or not path.is_dir():
        return [path]
    return sorted(folder for folder in path.iterdir() if (folder / CONFIG).exists()) or [path]


def read_run(path: Path, *, evaluated: bool = True) -> Run:
    """Read a run folder.

    The last line of a killed run may be incomplete, and its last evaluation may lack domains. Both are skipped with a
    warning on standard error. A resumed run may contain a step twice. The later line then counts.

    Args:
        path: the folder.
        evaluated: True if at least one evaluation is required.

    Raises:
        UserError: a file is missing or damaged, a line is invalid, or there is no step or no required evaluation.
    """
    config = _read_config(path)
    metrics = _read_metrics(path / METRICS)
    steps = np.array([record.step for record in metrics], dtype=np.int64)
    evaluations = _read_evaluations(path / EVALUATION, steps, needed=evaluated)
    rates = [record.tokens_per_second for record in metrics]
    shares = [record.mfu for record in metrics if record.mfu is not None]
    peaks = [record.peak_memory for record in metrics if record.peak_memory is not None]
    return Run(
        path=path,
        name=config["run"]["name"],
        config=config,
        seed=config["training"]["seed"],
        steps=steps,
        tokens=np.array([record.tokens for record in metrics], dtype=np.int64),
        losses=np.array([record.loss for record in metrics], dtype=np.float64),
        tokens_per_second=np.array(rates, dtype=np.float64),  # None becomes NaN
        evaluation_steps=evaluations.steps,
        domains=evaluations.domains,
        size=_read_size(path / MODEL),
        peak_memory=max(peaks, default=None),
        mfu=float(np.median(shares)) if shares else None,
        other_text_until=evaluations.other_text_until,
        left_out=evaluations.left_out,
    )


def _warn(where: str, message: str) -> None:
    print(printable(f"warning: {where}: {message}"), file=sys.stderr)


def _read_bytes(path: Path, hint: str) -> bytes:
    try:
        return read_regular(path)
    except FileNotFoundError:
        raise UserError(str(path), "is missing", hint) from None
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({os_reason(error)})", hint) from None


def _read_config(path: Path) -> dict[str, Any]:
    """Read config.yaml as plain mappings and check presence and type of the fields that identify a run."""
    file = path / CONFIG
    data = _read_bytes(file, "give the folder of a run: it contains config.yaml, metrics.jsonl and evaluation.jsonl")
    hint = "restore the configuration that was saved with the run"
    try:
        config = redacted_tree(parse_yaml(data.decode("utf-8")))
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{file}{line}", f"is not YAML ({error.problem})", hint) from None
    except TooLargeError as error:
        raise UserError(str(file), f"is too large for a configuration ({error})", hint) from None
    except (YAMLError, ValueError, RecursionError):
        raise UserError(str(file), "is not YAML", hint) from None
    needed = (("model", "pattern", str), ("training", "seed", int), ("run", "name", str), ("training", "steps", int))
    for section, key, kind in needed:
        values = config.get(section) if isinstance(config, dict) else None
        if not isinstance(values, dict) or not isinstance(values.get(key), kind):
            raise UserError(str(file), f"has no {section}.{key}", hint)
    return config


def _read_size(path: Path) -> ModelSize | None:
    if not path.exists():
        return None
    hint = "restore the file or resume the run, which rewrites it"
    try:
        return TypeAdapter(ModelSize).validate_json(_read_bytes(path, hint))
    except ValidationError as error:
        raise UserError(str(path), _problem(error.errors(include_url=False)[0]), hint) from None


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
            # The last line has no newline after it: the writer was killed.
            if first["type"] == "json_invalid" and number == len(lines):
                _warn(where, "half-written last line ignored")
                continue
            raise UserError(where, _problem(first), "restore the file or repeat the run") from None


def _problem(first: ErrorDetails) -> str:
    """Describe the first validation error of pydantic."""
    field = ".".join(str(part) for part in first["loc"])
    broken = first["type"] == "json_invalid" or not field
    return "is not a JSON object" if broken else f"{field}: {first['msg'].lower()}"


def _read_metrics(path: Path) -> list[StepRecord]:
    """Read the steps of a run in ascending order. If a step was written twice, the later line counts."""
    by_step = {line.record.step: line.record for line in parse_lines(path, StepRecord, "give the folder of a run")}
    if not by_step:
        raise UserError(str(path), "contains no step", "train the run first")
    return [by_step[step] for step in sorted(by_step)]


@dataclass(frozen=True)
class _Scores:
    """Evaluation of a domain by document: unique ids in ascending order, tokens and summed nats."""

    where: str
    documents: IntArray
    tokens: IntArray
    losses: FloatArray


def _scores(line: Line[EvaluationRecord]) -> _Scores:
    record = line.record
    hint = "restore the file or repeat the run"
    if not len(record.documents) == len(record.document_loss) == len(record.document_tokens):
        raise UserError(line.where, "documents, document_loss and document_tokens differ in length", hint)
    # A document that was scored in several pieces counts as one, because its pieces are not independent samples.
    documents, index = np.unique(np.array(record.documents, dtype=np.int64), return_inverse=True)
    tokens = np.bincount(index, weights=record.document_tokens).astype(np.int64)
    losses = np.bincount(index, weights=record.document_loss).astype(np.float64)
    if tokens.sum() != record.num_tokens:
        raise UserError(line.where, f"num_tokens {record.num_tokens} but its documents have {tokens.sum()}", hint)
    mean = losses.sum() / tokens.sum()
    if abs(mean - record.loss) > LOSS_TOLERANCE * max(1.0, abs(mean)):
        raise UserError(line.where, f"loss {record.loss:.6g} but its documents give {mean:.6g}", hint)
    return _Scores(line.where, documents, tokens, losses)


@dataclass(frozen=True)
class _Evaluations:
    """Evaluations at steps with a known training loss; the fields are those of `Run`."""

    steps: IntArray
    domains: tuple[DomainEvaluations, ...] = ()
    other_text_until: int = 0
    left_out: tuple[str, ...] = ()


def _read_evaluations(path: Path, steps: IntArray, *, needed: bool) -> _Evaluations:
    if not needed and not path.exists():
        return _Evaluations(np.empty(0, dtype=np.int64))
    hint = "train with training.evaluate_every above 0"
    by_step: dict[int, dict[tuple[Split, str], _Scores]] = {}
    texts: dict[int, str | None] = {}
    for line in parse_lines(path, EvaluationRecord, hint):
        key = (line.record.split, line.record.domain)
        by_step.setdefault(line.record.step, {})[key] = _scores(line)
        texts[line.record.step] = line.record.data
    by_step.pop(0, None)  # before the first step there is no training loss to compare at
    _drop_incomplete(path, by_step, texts)
    for step in sorted(set(by_step) - set(steps.tolist())):
        _warn(str(path), f"evaluation at step {step} ignored: metrics.jsonl has no such step")
        del by_step[step]
    if not by_step:
        if needed:
            raise UserError(str(path), "contains no evaluation after a training step", hint)
        return _Evaluations(np.empty(0, dtype=np.int64))
    order = sorted(by_step)
    keys = sorted(set.intersection(*(set(scores) for scores in by_step.values())))
    left_out = sorted({key for scores in by_step.values() for key in scores} - set(keys))
    names = tuple(f"{domain} ({split})" for split, domain in left_out)
    if names:
        problem = "not used, because only some evaluations have it: data.test_domains was changed during the run"
        _warn(str(path), f"{', '.join(names)} {problem}")
    domains = tuple(_stack(key, [by_step[step][key] for step in order]) for key in keys)
    newest = texts[order[-1]]
    # The digest covers all domains, so it can be compared only between evaluations of the same domains.
    like = [step for step in order if by_step[step].keys() == by_step[order[-1]].keys()]
    other = [step for step in like if texts[step] not in (None, newest)] if newest is not None else []
    return _Evaluations(np.array(order, dtype=np.int64), domains, max(other, default=0), names)


def _drop_incomplete(path: Path, by_step: dict[int, Any], texts: Mapping[int, str | None]) -> None:
    """Drop the last evaluation if it was interrupted between two domains; missing domains elsewhere are an error.

    Evaluations on other text may have other domains, because test domains may be changed when a run is resumed. If the
    last evaluation is the only one on its text, there is none to compare it with. It then counts as interrupted if its
    domains are a strict subset of those of the previous evaluation.
    """
    last = max(by_step, default=0)
    for step in sorted(by_step):
        peers = [one for one in by_step if texts[one] == texts[step]]
        before = [one for one in by_step if one < step]
        if step == last and peers == [step] and before and by_step[step].keys() < by_step[max(before)].keys():
            peers = [max(before)]
        keys = sorted({key for peer in peers for key in by_step[peer]})
        missing = [f"{domain} ({split})" for split, domain in keys if (split, domain) not in by_step[step]]
        if not missing:
            continue
        if step != last:
            problem = f"the evaluation at step {step} lacks {', '.join(missing)}"
            raise UserError(str(path), problem, "restore the file or repeat the run")
        _warn(str(path), f"evaluation at step {step} ignored: it was interrupted before {', '.join(missing)}")
        del by_step[step]


def _stack(key: tuple[Split, str], scores: Sequence[_Scores]) -> DomainEvaluations:
    first = scores[0]
    for other in scores[1:]:
        if not _same_documents(first.documents, first.tokens, other.documents, other.tokens):
            problem = f"domain {key[1]} has other documents than at {first.where}"
            raise UserError(other.where, problem, "evaluate a run on the same data at every step")
    losses = np.stack([score.losses for score in scores])
    return DomainEvaluations(*key, documents=first.documents, tokens=first.tokens, losses=losses)


def _same_documents(documents: IntArray, tokens: IntArray, other_documents: IntArray, other_tokens: IntArray) -> bool:
    return np.array_equal(documents, other_documents) and np.array_equal(tokens, other_tokens)


def check_same_data(run: Run, first: Run) -> None:
    """Raise a `UserError` if a run is trained on other domains or evaluated on other documents than the first one."""
    where, hint = str(run.path), f"compare runs over the same data; the first run is {first.path}"
    train, first_train = (one.config.get("data", {}).get("train_domains") for one in (run, first))
    if train and first_train and sorted(train) != sorted(first_train) and not _same_domains(run, first):
        raise UserError(where, f"trained on {', '.join(train)}, the first run on {', '.join(first_train)}", hint)
    if not run.domains:
        return
    names, first_names = ([f"{d.domain} ({d.split})" for d in one.domains] for one in (run, first))
    if names != first_names:
        raise UserError(where, f"evaluated on {', '.join(names)}, the first run on {', '.join(first_names)}", hint)
    for one, other in zip(run.domains, first.domains, strict=True):
        if not _same_documents(one.documents, one.tokens, other.documents, other.tokens):
            raise UserError(where, f"domain {one.domain} ({one.split}) has other documents than the first run's", hint)


def _same_domains(run: Run, first: Run) -> bool:
    """Return True if both runs recorded the names of their training domains and these are equal.

    The names in the configuration are not reliable for this, because a domain may be written in several ways.
    """
    names = [
        {text["domain"] for text in one.size.data.texts if text["split"] == "train"}
        for one in (run, first)
        if one.size is not None and one.size.data is not None
    ]
    return len(names) == 2 and names[0] == names[1]
