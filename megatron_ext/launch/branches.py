"""Dependencies between runs of a sweep: a branch (`run.branch_from`) waits for its trunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from megatron_ext.config.schema import RunConfig, TrainingConfig
from megatron_ext.run_folder.layout import CHECKPOINTS, parse_step_name, step_name
from megatron_ext.utils.errors import UserError

_EXAMPLE = f"{CHECKPOINTS}/{step_name(400)}"


def is_checkpoint(path: Path) -> bool:
    """Return True if a path is a folder with the name of a checkpoint."""
    return parse_step_name(path.name) is not None and path.is_dir()


def find_trunks(folder: Path, configs: Mapping[str, RunConfig]) -> dict[str, str]:
    """Return the trunk of each run that branches from another run of its sweep.

    Args:
        folder: folder that contains the run folders.
        configs: configurations of the sweep's runs, by name.

    Raises:
        UserError: a trunk does not keep the checkpoint that a run branches from, or the dependencies are cyclic.
    """
    trunks = {}
    for name, config in configs.items():
        if config.run.branch_from is None:
            continue
        checkpoint = Path(config.run.branch_from).absolute()
        run = checkpoint.parent.parent
        if run.parent != folder.absolute() or run.name not in configs:
            continue
        step = parse_step_name(checkpoint.name)
        if not checkpoint.exists():
            where = f"run {name}: run.branch_from"
            if step is None:
                raise UserError(
                    where, f"{checkpoint} is not a checkpoint of a run", f"give a path like {run}/{_EXAMPLE}"
                )
            _check_checkpoint_kept(where, run.name, configs[run.name].training, step)
        trunks[name] = run.name
    try:
        group_by_trunk(configs, trunks)
    except CycleError as error:
        cycle = ", ".join(error.args[1][1:])
        problem = f"these runs wait for each other: {cycle}"
        raise UserError("run.branch_from", problem, "remove run.branch_from from one of them") from None
    return trunks


def group_by_trunk(names: Iterable[str], trunks: Mapping[str, str]) -> dict[str | None, list[str]]:
    """Group runs by the trunk that they wait for; None if their trunk is not in `names`.

    The group of a trunk's branches follows the group that contains the trunk.

    Args:
        names: names of the runs.
        trunks: trunk of each run that branches from another run.
    """
    names = list(names)
    trunk_by_run = {name: trunks[name] if trunks.get(name) in names else None for name in names}
    groups: dict[str | None, list[str]] = {}
    dependencies = {name: [trunk] if trunk else [] for name, trunk in trunk_by_run.items()}
    for name in TopologicalSorter(dependencies).static_order():
        groups.setdefault(trunk_by_run[name], []).append(name)
    return {trunk: sorted(group, key=names.index) for trunk, group in groups.items()}


def _check_checkpoint_kept(where: str, trunk: str, training: TrainingConfig, step: int) -> None:
    """Reject a checkpoint that a trunk does not write, or may remove before it ends."""
    checkpoint_every, last = training.checkpoint_every, training.steps
    if step != last and (not checkpoint_every or step % checkpoint_every or step > last):
        interval = f"every {checkpoint_every} steps and" if checkpoint_every else "only"
        problem = f"{trunk} writes no checkpoint at step {step}, but {interval} at its last step {last}"
        raise UserError(where, problem, "choose one of these steps, or set its training.checkpoint_every")
    is_kept = training.keep_every and step % training.keep_every == 0
    if step != last and training.keep_checkpoints and not is_kept:
        problem = (
            f"{trunk} keeps only its newest {training.keep_checkpoints} checkpoints, which may not include step {step}"
        )
        raise UserError(where, problem, f"set training.keep_every={step} for {trunk}")
