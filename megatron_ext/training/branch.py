"""Runs that start from a checkpoint of another run.

A trunk run trains with a constant learning rate (warm-up-stable-decay). Short branches start from it and decay the
rate. This yields models at several token budgets for little more than the cost of the longest run (Hu et al. 2024,
arXiv 2404.06395; Haegele et al. 2024, arXiv 2405.18392). A branch is bitwise identical to a run with the branch's
configuration that is trained from scratch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.checkpoint.folder import CheckpointFolder
from megatron_ext.run_folder.layout import METRICS
from megatron_ext.training.records import recorded_lr
from megatron_ext.utils.errors import UserError

FIELD = "run.branch_from"
EXAMPLE = "give a checkpoint such as runs/trunk/checkpoints/step_400"


@dataclass(frozen=True)
class Branch:
    """Checkpoint of another run from which a run starts.

    Attributes:
        run: folder of the other run.
        checkpoints: checkpoint folder of the other run.
        step: step of the checkpoint.
    """

    run: Path
    checkpoints: CheckpointFolder
    step: int

    def check_learning_rate(self, lr: float, *, is_allowed: bool = False) -> None:
        """Check that the other run used this run's learning rate at the branch step.

        `Continuation` compares the configurations. This method compares with the rate in the other run's records.

        Args:
            lr: this run's learning rate at the step.
            is_allowed: True to accept a different rate.

        Raises:
            UserError: the rate differs, so a run trained from scratch could not reach this state; or the other run has
                no record of the step.
        """
        trunk_lr = recorded_lr(self.run, self.step)
        if trunk_lr is None:
            hint = "restore it: the records of the branch start with a copy of it"
            raise UserError(str(self.run / METRICS), f"has no step {self.step}", hint)
        if not is_allowed and not math.isclose(trunk_lr, lr, rel_tol=1e-9):
            problem = f"had the learning rate {trunk_lr:.6g} at step {self.step}, where this run's is {lr:.6g}"
            hint = "branch off before the rate decays, from a run with the same rate, warm-up and schedule (wsd)"
            raise UserError(FIELD, f"{self.run} {problem}", hint)


def find_branch(checkpoint: str, steps: int) -> Branch:
    """Find the checkpoint that a run of `steps` steps branches from.

    Raises:
        UserError: the checkpoint does not exist, contains only a model, or does not precede the run's last step.
    """
    path = Path(checkpoint)
    checkpoints = CheckpointFolder(path.parent)
    step = next((step for step in checkpoints.steps() if checkpoints.path(step) == path), None)
    if step is None:
        raise UserError(FIELD, f"{path} is not a checkpoint of a run", EXAMPLE)
    if checkpoints.is_model_only(step):
        raise UserError(FIELD, f"{path} contains only a converted model, without optimizer state", EXAMPLE)
    if step >= steps:
        problem = f"{path} is not before the run's end, training.steps {steps}"
        raise UserError(FIELD, problem, "give an earlier checkpoint, or more steps")
    return Branch(path.parent.parent, checkpoints, step)
