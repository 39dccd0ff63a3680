"""Detection of sweep runs whose configuration or data have changed since they were started.

Runs of a sweep are identified by name. A run that was started with another configuration or other data is not the run
that the sweep now describes. Such a run is rejected until the user renames or restarts it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from data_prep.digest import digest, domain_texts, text_digest
from data_prep.manifest import load_manifest, match_domain
from megatron_ext.config.effects import Change, Effect, changes, flat
from megatron_ext.config.load import read_tree
from megatron_ext.config.schema import DataConfig, RunConfig
from megatron_ext.launch.job import Job, newest_job, next_folder
from megatron_ext.launch.readings import READ_ERRORS
from megatron_ext.run_folder.launch_events import LAUNCH, read_events
from megatron_ext.run_folder.layout import CHECKPOINTS, CONFIG, METRICS
from megatron_ext.utils.atomic_files import is_url, read_regular, write_atomically
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json

DATA = "data.json"
"""File in a job's folder with digests of the data at launch."""

REPLACED = Path(LAUNCH) / "replaced"
"""Folder in a sweep's folder with the earlier versions of restarted runs."""

TRAINING_TEXT = "training text"
_END_EVENTS = ("refused", "given up", "ended with", "stopped")
_MAX_RUNS, _MAX_FIELDS, _MAX_CHARACTERS = 3, 4, 60


@dataclass(frozen=True)
class Changed:
    """Run that differs from its description in the sweep.

    Attributes:
        name: name of the run.
        differences: differences: each field with both values, and the kinds of data that differ.
    """

    name: str
    differences: tuple[str, ...]

    def __str__(self) -> str:
        """Format the run and its differences for a message."""
        num_more = len(self.differences) - _MAX_FIELDS
        more = f" and {num_more} more fields" if num_more > 0 else ""
        return f"{self.name} ({', '.join(self.differences[:_MAX_FIELDS])}{more})"


def write_data_digests(job: Job, config: RunConfig) -> None:
    """Write digests of the data to a job's folder, if the data can be read here.

    Args:
        job: job whose folder has been written.
        config: configuration of the run.
    """
    found = data_digests(config.data)
    if found is not None:
        write_atomically(job.folder / DATA, (json.dumps(found, indent=1) + "\n").encode())


def data_digests(data: DataConfig) -> dict[str, str] | None:
    """Return digests of training text, evaluation text and tokenizer; None if the manifest cannot be read.

    Args:
        data: data section of a configuration.
    """
    if is_url(data.path):
        return None
    domains = None if data.train_domains is None else tuple(data.train_domains)
    return _compute_digests(str(Path(data.path).absolute()), domains)


@cache
def _compute_digests(path: str, domains: tuple[str, ...] | None) -> dict[str, str] | None:
    try:
        manifest = load_manifest(Path(path))
        evaluation_texts = [text for split in ("validation", "test") for text in domain_texts(manifest, split)]
        return {
            TRAINING_TEXT: text_digest(domain_texts(manifest, "train", domains)),
            "text to evaluate on": text_digest(evaluation_texts),
            "tokenizer": digest(manifest.tokenizer.sha256),
        }
    except (UserError, *READ_ERRORS):
        return None


def changed_runs(folder: Path, configs: Mapping[str, RunConfig], is_finished: Callable[[Path], bool]) -> list[Changed]:
    """Return the runs of a sweep that were started with a different configuration or data.

    Args:
        folder: folder that contains the run folders.
        configs: configurations of the sweep's runs, by name.
        is_finished: function that returns True if the run in a folder is finished.
    """
    found = []
    for name, config in configs.items():
        differences = _differences(folder / name, config, is_finished(folder / name))
        if differences:
            found.append(Changed(name, tuple(differences)))
    return found


def _differences(run: Path, config: RunConfig, finished: bool) -> list[str]:
    """Describe how a run differs from its start; empty if the run has no job, or ended without training."""
    job = newest_job(run)
    if job is None:
        return []
    has_trained = (run / METRICS).exists() or (run / CHECKPOINTS).exists()
    events = read_events(job.folder, [])
    has_ended = bool(events) and events[-1].description.startswith(_END_EVENTS)
    if has_ended and not has_trained:
        return []  # the change may fix the error
    data = _changed_data(job, config)
    own_paths = [run / CONFIG] if has_trained and (has_ended or finished) else []
    fields = _first_readable([*own_paths, job.folder / CONFIG])
    if fields is None:
        return data  # unreadable configurations are not compared; `selectron status` reports them
    found = [change for change in changes(fields, flat(config)) if _is_relevant(change, fields, finished)]
    return [*(_format_change(change) for change in found if not _is_equivalent(change, job, config)), *data]


def _first_readable(paths: Sequence[Path]) -> dict[str, Any] | None:
    """Return the fields of the first readable configuration, or None."""
    for path in paths:
        try:
            return flat(read_tree(path))
        except (UserError, *READ_ERRORS):
            continue
    return None


def _is_equivalent(change: Change, job: Job, config: RunConfig) -> bool:
    """Return True if domains or weights are written differently but are equivalent."""
    if change.field == "data.train_domains":
        before, now = _read_digests(job), data_digests(config.data)
        return now is not None and before.get(TRAINING_TEXT) == now[TRAINING_TEXT]
    if change.field != "data.weights" or not change.before or not change.after:
        return False
    after = {match_domain(name, change.before) or name: weight for name, weight in change.after.items()}
    return _normalize_weights(change.before) == _normalize_weights(after)


def _normalize_weights(weights: Mapping[str, float]) -> dict[str, Fraction]:
    """Return weights as exact fractions of their sum."""
    exact = {name: Fraction(repr(float(weight))) for name, weight in weights.items()}  # 0.1 counts as exactly 1/10
    total = sum(exact.values())
    return {name: weight / total for name, weight in exact.items()} if total else exact


def _is_relevant(change: Change, before: Mapping[str, Any], finished: bool) -> bool:
    """Return True if a change makes the run a different one.

    An unfinished run may change fields that affect future steps only.
    """
    if change.field.startswith("mixers.") and change.field not in before:
        return False  # field was added to the mixer later, or came with a pattern change
    ignored = {Effect.NOTHING} if finished else {Effect.NOTHING, Effect.MEASURED, Effect.FUTURE}
    return change.effect not in ignored


def _format_change(change: Change) -> str:
    before, after = (_format_value(value) for value in (change.before, change.after))
    return f"{change.field} is {after}, was {before}"


def _format_value(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def _changed_data(job: Job, config: RunConfig) -> list[str]:
    before, now = _read_digests(job), data_digests(config.data)
    return [] if now is None else [f"other {kind}" for kind in now if before.get(kind) not in (None, now[kind])]


def _read_digests(job: Job) -> dict[str, Any]:
    """Return the digests in a job's folder; empty if it was started by older code, or its data could not be read."""
    try:
        found = parse_json(read_regular(job.folder / DATA))
    except READ_ERRORS:
        return {}
    return found if isinstance(found, dict) else {}


def runs_without_digests(folder: Path, configs: Mapping[str, RunConfig]) -> list[str]:
    """Return the names of runs whose jobs were launched without data digests although the data is readable now."""
    jobs = {name: newest_job(folder / name) for name in configs}
    known = {name for name, config in configs.items() if data_digests(config.data) is not None}
    return [name for name, job in jobs.items() if job and name in known and not (job.folder / DATA).exists()]


def changed_runs_error(sweep: Path, changed: Sequence[Changed]) -> UserError:
    """Return the error that names changed runs and the user's options."""
    more = f" and {len(changed) - _MAX_RUNS} more" if len(changed) > _MAX_RUNS else ""
    named = "; ".join(map(str, changed[:_MAX_RUNS]))
    problem = f"{len(changed)} of its runs were started with other settings or data: {named}{more}"
    options = " ".join(f"--restart {change.name}" for change in changed)
    hint = f"give them new names, or restart them with {options} (their old folders are kept)"
    return UserError(str(sweep), problem, hint)


def check_restarts(restarts: Sequence[str], configs: Mapping[str, RunConfig], trunks: Mapping[str, str]) -> None:
    """Check that runs to restart belong to the sweep and that their branches are restarted, too.

    Args:
        restarts: names of runs.
        configs: configurations of the sweep's runs, by name.
        trunks: trunk of each run that branches from another run.

    Raises:
        UserError: there is no such run, or a branch of it is not restarted.
    """
    for name in restarts:
        if name not in configs:
            raise UserError("--restart", f"there is no run {name}", f"choose from: {', '.join(configs)}")
    for name, trunk in trunks.items():
        if trunk in restarts and name not in restarts:
            raise UserError("--restart", f"{name} branches from a checkpoint of {trunk}", f"add --restart {name}")


def move_aside(folder: Path, name: str) -> Path | None:
    """Move a run aside, so that it starts from the beginning; nothing is deleted.

    Args:
        folder: folder that contains the run folders.
        name: name of the run, which must not have a live job or process.

    Returns:
        New location of the run's folder; None if the run does not exist.

    Raises:
        OSError: the folder cannot be moved.
    """
    run = folder / name
    if not run.exists():
        return None
    target = next_folder(folder / REPLACED / name)
    os.rename(run, target)
    return target
