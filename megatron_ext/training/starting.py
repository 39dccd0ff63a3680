"""Starting point of a run: its beginning or one of its checkpoints."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

from megatron_ext.checkpoint.folder import CheckpointFolder, DamagedCheckpoint
from megatron_ext.config.schema import RunConfig
from megatron_ext.parallel.first_rank import print_on_first_rank
from megatron_ext.run_folder.layout import CHECKPOINTS, CONFIG, METRICS
from megatron_ext.training import trial
from megatron_ext.training.continuing import Continuation
from megatron_ext.utils.errors import UserError

Resume = Literal["auto"] | bool
"""Start of a run. True: from the newest checkpoint, which must exist. "auto": from the newest checkpoint if there is
one, else from the beginning. False: from the beginning.
"""


def run_folder(config: RunConfig) -> Path:
    """Return the run folder, `run.dir/run.name`."""
    return Path(config.run.dir) / config.run.name


def reject_existing(folder: Path) -> None:
    """Reject a folder that already contains a run.

    Raises:
        UserError: the folder contains a run.
    """
    if (folder / CHECKPOINTS / "latest").exists():
        raise UserError("run.name", f"{folder} already contains a run", "add --resume, or choose another run.name")
    if _has_started(folder):
        problem = f"{folder} already contains a run without a checkpoint"
        hint = "add --resume=auto to start it from the beginning, or choose another run.name"
        raise UserError("run.name", problem, hint)


def starting_step(folder: Path, resume: Resume, from_step: int | None, *, is_trial: bool = False) -> int | None:
    """Return the step of the checkpoint to continue from; None to start from the beginning.

    Args:
        folder: run folder.
        resume: see `Resume`.
        from_step: continue from the checkpoint of exactly this step.
        is_trial: True if the run is a trial, which replaces an earlier trial.

    Raises:
        UserError: a run exists and `resume` is False, no checkpoint exists to resume from, or the checkpoint
            contains only a model.
    """
    if is_trial and trial.is_trial(folder):
        return None
    if not resume and from_step is None:
        reject_existing(folder)
        return None
    checkpoints = CheckpointFolder(folder / CHECKPOINTS)
    step = from_step if from_step is not None else checkpoints.latest()
    if step is None:
        if resume != "auto":
            raise _nothing_to_resume(folder)
        return None
    if checkpoints.is_model_only(step):
        problem = "contains only a converted model, without optimizer state, random generators and data position"
        hint = "it can generate text, but training cannot continue from it"
        raise UserError(str(checkpoints.path(step)), problem, hint)
    return step


def check_can_start(config: RunConfig, resume: Resume) -> None:
    """Check before a job is submitted that it could start, as far as this is possible without the data.

    A run that ended before its first checkpoint can be resumed with "auto"; it then starts from the beginning.

    Raises:
        UserError: see `starting_step`; or a field that affects the completed steps differs.
    """
    folder = run_folder(config)
    if not resume:
        reject_existing(folder)
    elif not folder.is_dir() and resume != "auto":
        raise _nothing_to_resume(folder)
    step = CheckpointFolder(folder / CHECKPOINTS).latest() if resume else None
    if step is not None:
        _print_changes(config, step)


def check_finished(config: RunConfig, step: int) -> None:
    """Compare a finished run with its last checkpoint, and print the differences and that it is finished.

    The data is not opened: it may have been removed.

    Raises:
        UserError: a field that affects the completed steps differs.
    """
    _print_changes(config, step)
    print_on_first_rank(f"{run_folder(config)} is finished: step {step} of {config.training.steps}")


def _print_changes(config: RunConfig, step: int) -> None:
    checkpoints = CheckpointFolder(run_folder(config) / CHECKPOINTS)
    try:
        record = checkpoints.read_record(step)
    except DamagedCheckpoint as damage:
        problem = f"{damage.problem}; the configuration was not compared with it"
        print_on_first_rank(f"selectron: warning: {damage.where}: {problem}")
    else:
        for line in Continuation(config, None).compare(record, checkpoints.path(step)).messages:
            print_on_first_rank(line)


def _has_started(folder: Path) -> bool:
    return (folder / METRICS).exists() or (folder / CHECKPOINTS).exists()


def _nothing_to_resume(folder: Path) -> UserError:
    where, problem = "--resume", f"{folder} contains no checkpoint to resume from"
    if _has_started(folder):
        return UserError(where, problem, "use --resume=auto to start the run from the beginning")
    runs = sorted(path.parent.name for path in folder.parent.glob(f"*/{CONFIG}"))
    matches = difflib.get_close_matches(folder.name, runs, n=1)
    suggestion = f"did you mean run.name={matches[0]}? " if matches else ""
    return UserError(where, problem, f"{suggestion}--resume=auto starts a new run if there is none")
