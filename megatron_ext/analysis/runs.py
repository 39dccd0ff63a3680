"""Run folders, read for a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.analysis.run_files import (
    DomainEvaluations,
    FloatArray,
    IntArray,
    ModelSize,
    Split,
    read_config,
    read_evaluations,
    read_metrics,
    read_size,
    same_documents,
)
from megatron_ext.run_folder.layout import CONFIG, EVALUATION, METRICS, MODEL
from megatron_ext.utils.errors import UserError


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
        last_other_text_step: last step that was evaluated on other text than the newest evaluation; 0 if there is none.
        partial_domains: domains that only some evaluations have, because data.test_domains was changed during the run.
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
    last_other_text_step: int = 0
    partial_domains: tuple[str, ...] = ()

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

    @property
    def is_evaluated_at_end(self) -> bool:
        """True if there is an evaluation after the last step."""
        return bool(self.domains) and bool(self.evaluation_steps[-1] == self.steps[-1])

    def split_loss(self, split: Split) -> FloatArray:
        """Return the token-weighted mean loss [E] over a split's domains at each evaluation, in nats per token."""
        domains = self.split(split)
        nats = np.sum([domain.losses.sum(axis=1) for domain in domains], axis=0)
        return np.asarray(nats / sum(int(domain.tokens.sum()) for domain in domains))

    def final_loss(self, split: Split) -> float | None:
        """Return the loss on all documents of a split after the last step, in nats per token.

        None: the split was not evaluated after the last step.
        """
        if not self.split(split) or not self.is_evaluated_at_end:
            return None
        return float(self.split_loss(split)[-1])


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
    runs = _without_partial_domains([read_run(path, evaluated=evaluated) for path in folders])
    first = next((run for run in runs if run.domains), runs[0])
    for run in runs:
        check_same_data(run, first)
    if evaluated and not runs[0].split("test"):
        where = str(runs[0].path / EVALUATION)
        raise UserError(where, "has no out-of-domain (split test) evaluation", "train with data.test_domains")
    return runs


def _without_partial_domains(runs: list[Run]) -> list[Run]:
    """Remove from all runs the domains that some run evaluated in only some of its evaluations."""
    names = {name for run in runs for name in run.partial_domains}
    return [
        replace(run, domains=tuple(domain for domain in run.domains if _full_name(domain) not in names)) for run in runs
    ]


def _full_name(domain: DomainEvaluations) -> str:
    return f"{domain.domain} ({domain.split})"


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
    config = read_config(path)
    metrics = read_metrics(path / METRICS)
    steps = np.array([record.step for record in metrics], dtype=np.int64)
    evaluations = read_evaluations(path / EVALUATION, steps, needed=evaluated)
    rates = [record.tokens_per_second for record in metrics]
    utilizations = [record.mfu for record in metrics if record.mfu is not None]
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
        size=read_size(path / MODEL),
        peak_memory=max(peaks, default=None),
        mfu=float(np.median(utilizations)) if utilizations else None,
        last_other_text_step=evaluations.last_other_text_step,
        partial_domains=evaluations.partial_domains,
    )


def check_same_data(run: Run, first: Run) -> None:
    """Raise a `UserError` if a run is trained on other domains or evaluated on other documents than the first one."""
    where, hint = str(run.path), f"compare runs over the same data; the first run is {first.path}"
    train, first_train = (each.config.get("data", {}).get("train_domains") for each in (run, first))
    if train and first_train and sorted(train) != sorted(first_train) and not _same_domains(run, first):
        raise UserError(where, f"trained on {', '.join(train)}, the first run on {', '.join(first_train)}", hint)
    if not run.domains:
        return
    names, first_names = ([_full_name(domain) for domain in each.domains] for each in (run, first))
    if names != first_names:
        raise UserError(where, f"evaluated on {', '.join(names)}, the first run on {', '.join(first_names)}", hint)
    for domain, other in zip(run.domains, first.domains, strict=True):
        if not same_documents(domain.documents, domain.tokens, other.documents, other.tokens):
            raise UserError(where, f"domain {_full_name(domain)} has other documents than the first run's", hint)


def _same_domains(run: Run, first: Run) -> bool:
    """Return True if both runs recorded the names of their training domains and these are equal.

    The names in the configuration are not reliable for this, because a domain may be written in several ways.
    """
    names = [
        {text["domain"] for text in each.size.data.texts if text["split"] == "train"}
        for each in (run, first)
        if each.size is not None and each.size.data is not None
    ]
    return len(names) == 2 and names[0] == names[1]
