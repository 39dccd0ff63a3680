"""Choice of fields such as the learning rate by validation loss, for each architecture of a comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from megatron_ext.analysis.architecture import comparable_recipes, group_runs
from megatron_ext.analysis.decisions import Decision, read_decisions
from megatron_ext.analysis.run_files import read_sweep_record
from megatron_ext.analysis.runs import Run
from megatron_ext.utils.errors import UserError

Settings = Mapping[str, Any]
"""Values of the chosen fields, by dotted name."""


@dataclass(frozen=True)
class Trial:
    """Runs with the same values of the chosen fields.

    Attributes:
        settings: values of the chosen fields.
        runs: the runs, one per seed.
        losses: validation loss after the last step by seed, in nats per token, for the seeds that were trained with
            every value; infinite for a run that was stopped by a faulty step.
    """

    settings: Settings
    runs: tuple[Run, ...]
    losses: Mapping[int, float]

    @property
    def loss(self) -> float:
        """Mean validation loss over the seeds, in nats per token."""
        return sum(self.losses.values()) / len(self.losses)


@dataclass(frozen=True)
class Choice:
    """Choice for one architecture.

    Attributes:
        label: label of the architecture among the chosen runs.
        trials: trials in ascending order of their values, where these are numbers, else in the order of the runs.
    """

    label: str
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """Trial with the lowest loss; the first one of several."""
        return _best(self.trials)

    @property
    def fields(self) -> list[str]:
        """Chosen fields that distinguish trials, without those that vary together with an earlier one."""
        by_partition: dict[tuple[int, ...], str] = {}
        for field in self.best.settings:
            values = [trial.settings[field] for trial in self.trials]
            by_partition.setdefault(tuple(map(values.index, values)), field)
        by_partition.pop((0,) * len(self.trials), None)  # a field with a single value
        return list(by_partition.values())

    @property
    def edges(self) -> dict[str, str]:
        """Fields whose best value is the `lowest` or `highest` of the values tried.

        A value of 0 is not an edge, because none of these fields can be negative.
        """
        found = {}
        for field in self.fields:
            best, values = self.best.settings[field], [trial.settings[field] for trial in self.trials]
            if best and all(map(is_number, values)) and best in (min(values), max(values)):
                found[field] = "lowest" if best == min(values) else "highest"
        return found


@dataclass(frozen=True)
class Choices:
    """Choices for all architectures.

    Attributes:
        runs: the runs with the best values, of all seeds, in the given order.
        choices: choice for each architecture that was trained with several values.
        warnings: sentences without the full stop: a best value at an edge of the values tried, and architectures with
            a single value beside others with several.
    """

    runs: list[Run]
    choices: Sequence[Choice] = ()
    warnings: Sequence[str] = ()


def chosen_fields(runs: Sequence[Run]) -> list[str]:
    """Return the fields that the sweeps of some runs choose by validation loss.

    A sweep lists its runs in sweep.json beside their folders. Runs of no sweep add nothing.

    Raises:
        UserError: a sweep.json is invalid.
    """
    folders: dict[Path, list[Run]] = {}
    for run in runs:
        folders.setdefault(run.path.resolve().parent, []).append(run)
    fields: dict[str, None] = {}
    for folder, members in folders.items():
        record = read_sweep_record(folder)
        if any(run.path.resolve().name in record.runs for run in members):
            fields |= dict.fromkeys(record.chosen)
    return list(fields)


def choose_runs(runs: Sequence[Run], fields: Sequence[str]) -> Choices:
    """Choose the values of some fields with the lowest validation loss, separately for each architecture.

    Runs that differ only in these fields and the seed compete. Validation loss is the loss on all held-out documents of
    the training domains after the last step, averaged over the seeds that were trained with every value. A run that was
    stopped by a faulty step has an infinite loss.

    Args:
        runs: runs of a comparison.
        fields: dotted names of the chosen fields; without any, all runs are returned.

    Raises:
        UserError: runs that compete have unequal lengths, no seed in common or no validation loss.
    """
    if not fields:
        return Choices(list(runs))
    groups: dict[str, list[tuple[Run, Settings]]] = {}
    for run, recipe in zip(runs, comparable_recipes(runs), strict=True):
        settings = {field: recipe.pop(field, None) for field in fields}
        groups.setdefault(_key(recipe), []).append((run, settings))
    trials_of = [_trials(members) for members in groups.values()]
    kept = {id(run) for trials in trials_of for run in _best(trials).runs}
    best_runs = [run for run in runs if id(run) in kept]
    labels = {id(run): architecture.label for architecture in group_runs(best_runs) for run in architecture.runs}
    labelled = [(labels[id(_best(trials).runs[0])], trials) for trials in trials_of]
    choices = [Choice(label, tuple(trials)) for label, trials in labelled if len(trials) > 1]
    single = [label for label, trials in labelled if len(trials) == 1] if choices else []
    return Choices(best_runs, choices, [*_edge_warnings(choices), *_single_warnings(single, fields)])


def _best(trials: Sequence[Trial]) -> Trial:
    return trials[0] if len(trials) == 1 else min(trials, key=lambda trial: trial.loss)


def _trials(members: Sequence[tuple[Run, Settings]]) -> list[Trial]:
    """Group runs of one architecture by their settings, with their losses if there are several groups."""
    groups: dict[str, list[tuple[Run, Settings]]] = {}
    for run, settings in members:
        groups.setdefault(_key(settings), []).append((run, settings))
    runs_of = [tuple(run for run, _ in group) for group in groups.values()]
    all_settings = [group[0][1] for group in groups.values()]
    if len(groups) == 1:
        return [Trial(all_settings[0], runs_of[0], {})]
    names = ", ".join(all_settings[0])
    seeds = set.intersection(*({run.seed for run in runs} for runs in runs_of))
    if not seeds:
        problem = f"no seed was trained with every value of {names} that the same architecture was trained with"
        raise UserError(str(runs_of[0][0].path), problem, "train one seed with all of them")
    competing = [run for runs in runs_of for run in runs if run.seed in seeds]
    losses = _final_losses(competing, names)
    trials = [
        Trial(settings, runs, {run.seed: losses[id(run)] for run in runs if run.seed in seeds})
        for settings, runs in zip(all_settings, runs_of, strict=True)
    ]
    if all(is_number(value) for settings in all_settings for value in settings.values()):
        trials.sort(key=lambda trial: tuple(trial.settings.values()))
    return trials


def _final_losses(runs: Sequence[Run], fields: str) -> dict[int, float]:
    """Return the validation loss of each run after its last step, by the run's identity.

    Raises:
        UserError: the runs have unequal lengths, all were stopped by faulty steps, or one has no validation loss.
    """
    stopped = {id(entry.run) for entry in read_decisions(runs) if _was_stopped(entry.run, entry.decisions)}
    whole = [run for run in runs if id(run) not in stopped]
    if not whole:
        problem = f"was stopped by a faulty step, as was every run with another value of {fields}"
        raise UserError(str(runs[0].path), problem, "train with other values")
    longest = max(whole, key=lambda run: int(run.tokens[-1]))
    losses = {id(run): float("inf") for run in runs}
    for run in whole:
        if run.tokens[-1] != longest.tokens[-1]:
            ends = f"ends after {run.tokens[-1]:,} tokens and {longest.path} after {longest.tokens[-1]:,}"
            problem = f"{ends}, but {fields} is chosen by the loss of equally long runs"
            raise UserError(str(run.path), problem, "finish it with --resume, or remove it from the comparison")
        loss = run.final_loss("validation")
        if loss is None:
            problem = f"has no validation loss after its last step, by which {fields} is chosen"
            raise UserError(str(run.path), problem, "train with training.evaluate_every on data with validation text")
        losses[id(run)] = loss
    return losses


def _was_stopped(run: Run, decisions: Sequence[Decision]) -> bool:
    """Return True if a run ended because of a faulty step that it has not passed since."""
    return bool(decisions) and decisions[-1].decision == "stop" and decisions[-1].step > run.steps[-1]


def _edge_warnings(choices: Sequence[Choice]) -> list[str]:
    return [
        f"{choice.label}: the best {field}, {choice.best.settings[field]:g}, is the {edge} of "
        f"{len({trial.settings[field] for trial in choice.trials})} values tried; one beyond it may be better"
        for choice in choices
        for field, edge in choice.edges.items()
    ]


def _single_warnings(labels: Sequence[str], fields: Sequence[str]) -> list[str]:
    names = ", ".join(fields)
    return [f"{label} was trained with a single value of {names}, other architectures with several" for label in labels]


def is_number(value: object) -> TypeGuard[float]:
    """Return True for an int or float, but not for a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _key(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, default=str)
