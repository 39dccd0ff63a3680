"""Expansion of a sweep file into runs: planned lengths and matched parameters become ordinary fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_ext.config.schema import RunConfig
from megatron_ext.config.sweep_file import WIDTH, MatchParameters, read_sweep, sweep_errors
from megatron_ext.planning.counts import ModelCounter, ModelCounts
from megatron_ext.planning.fields import DERIVED, PlanFields, split_plan
from megatron_ext.planning.matching import matched_width
from megatron_ext.planning.steps import planned_steps, step_tokens
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.markdown import table

LoadConfig = Callable[[Path, Sequence[str]], RunConfig]
"""Function that reads a configuration file and applies overrides; see `load_config`."""

CheckConfig = Callable[[RunConfig], None]
"""Function that raises an error for an invalid configuration."""

_PLACEHOLDER_STEPS = 1 << 40
"""Placeholder for a run's number of steps before it is derived: longer than any schedule."""


@dataclass(frozen=True)
class SweepRun:
    """Run of a sweep.

    Attributes:
        config: whole and checked configuration.
        overrides: overrides of the base configuration.
        counts: parameters and FLOPs of the run's model, if runs are listed and this run has a plan or takes part in
            parameter matching; else None.
    """

    config: RunConfig
    overrides: list[str]
    counts: ModelCounts | None = None


def sweep_runs(
    path: Path, common_overrides: Sequence[str], load: LoadConfig, check: CheckConfig, *, listed: bool = False
) -> dict[str, SweepRun]:
    """Return the runs of a sweep by name, with all fields derived from their plans.

    Args:
        path: path of the sweep file.
        common_overrides: overrides of all runs, applied after the derived fields.
        load: reads a run's configuration.
        check: applied to every run.
        listed: True if the runs will be listed. Planned and matched models are then counted even if no field depends on
            the counts.

    Raises:
        UserError: the file or a run is invalid. The message names the file and the run.
    """
    sweep = read_sweep(path)
    if not sweep.config.is_file():
        raise UserError(f"{path}: config", f"there is no file {sweep.config}", "give a path relative to the sweep file")
    drafts: dict[str, _Draft] = {}
    for name, fields in sweep.runs.items():
        with sweep_errors(path, name):
            drafts[name] = _Draft(sweep.config, [f"run.name={name}"], load, *split_plan(fields, common_overrides))
    reference_runs, match = sweep.reference_runs, sweep.match
    runs = {}
    with ModelCounter() as counter:
        for name in dict.fromkeys(reference_runs.values()):
            with sweep_errors(path, name):
                drafts[name].check_model(check)
        for name, draft in drafts.items():
            with sweep_errors(path, name):
                if name in reference_runs:
                    assert match is not None, "a run has a measure only then"
                    _match_parameters(draft, reference_runs[name], drafts[reference_runs[name]], match, counter, check)
                if draft.plan is not None:
                    _derive_schedule(draft, draft.plan, counter, check)
                check(draft.config)
                planned = draft.plan is not None or name in reference_runs or name in reference_runs.values()
                counts = counter(draft.config) if listed and planned else None
                runs[name] = SweepRun(_set_run_folder(draft.config, path.stem), draft.overrides, counts)
    return runs


def _set_run_folder(config: RunConfig, name: str) -> RunConfig:
    return replace(config, run=replace(config.run, dir=str(Path(config.run.dir) / name)))


@dataclass
class _Draft:
    """Run whose fields are being derived."""

    base: Path
    name_override: list[str]
    load: LoadConfig
    plan: PlanFields | None
    fields: list[str]
    common_overrides: list[str]
    derived: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = self._load_config()

    @property
    def overrides(self) -> list[str]:
        """Overrides of the run, without its name."""
        return [*self.fields, *self.derived, *self.common_overrides]

    def derive(self, name: str, value: int) -> None:
        """Set a derived field. Overrides from the command line still take precedence."""
        self.fields = [entry for entry in self.fields if not entry.startswith(f"{name}=")]
        self.derived.append(f"{name}={value}")
        self.config = self._load_config()

    def check_model(self, check: CheckConfig) -> None:
        """Check all fields except the schedule, which is not derived yet, so that the model can be counted."""
        training = replace(self.config.training, steps=_PLACEHOLDER_STEPS)
        optimizer = replace(self.config.optimizer, schedule="constant", warmup_steps=0, decay_steps=0)
        check(replace(self.config, training=training, optimizer=optimizer))

    def _load_config(self) -> RunConfig:
        return self.load(self.base, [*self.overrides, *self.name_override])


def _match_parameters(
    draft: _Draft,
    reference_name: str,
    reference: _Draft,
    match: MatchParameters,
    counter: ModelCounter,
    check: CheckConfig,
) -> None:
    """Set the feed-forward width of a run so that it has as many parameters as the run `reference`."""
    draft.check_model(check)
    target = counter(reference.config).parameters
    width = matched_width(draft.config, reference_name, target, match, lambda config: counter(config).parameters)
    draft.derive(WIDTH, width)
    if (given := draft.config.model.ffn_hidden_size) != width:
        problem = f"{given} on the command line, but match_parameters sets it to {width}"
        raise UserError(WIDTH, problem, "remove one of them")


def _derive_schedule(draft: _Draft, plan: PlanFields, counter: ModelCounter, check: CheckConfig) -> None:
    """Set the number of steps of a run, and the fields that are a fraction of this number."""
    if plan.budget is not None:
        draft.check_model(check)
        name, budget = plan.budget
        draft.derive(DERIVED[name], planned_steps(name, budget, draft.config, counter))
    # Read from the configuration, because the command line may have overridden the derived number.
    steps = draft.config.training.steps
    for name, share in (("warmup_share", plan.warmup_share), ("decay_share", plan.decay_share)):
        if share is not None:
            draft.derive(DERIVED[name], round(share * steps))


def run_table(runs: Mapping[str, SweepRun]) -> list[str]:
    """Return the lines of `selectron sweep --dry-run`: name, size, length and overrides of each run."""
    rows = []
    counted = any(run.counts is not None for run in runs.values())
    for name, run in runs.items():
        steps = run.config.training.steps
        tokens = steps * step_tokens(run.config)
        size = "" if run.counts is None else f"{run.counts.parameters:,}"
        flops = "" if run.counts is None else f"{tokens * run.counts.flops_per_token:.3e}"
        length, changes = [str(steps), f"{tokens:,}"], " ".join(run.overrides)
        rows.append([name, size, *length, flops, changes] if counted else [name, *length, changes])
    columns = ("run", "parameters", "steps", "tokens", "training FLOPs", "fields")
    return table(columns if counted else [columns[n] for n in (0, 2, 3, 5)], rows)
