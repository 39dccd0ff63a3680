"""Runs that begin from another run's checkpoint.

Of one long run whose rate stays (warm-up-stable-decay), short ones branch off in which it falls: models of several
token counts for little more than the longest costs (Hu et al. 2024, arXiv 2404.06395; Haegele et al. 2024,
arXiv 2405.18392). A branch is to the last bit the run that its configuration would have made from the start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.checkpoint.folder import CheckpointFolder
from megatron_ext.errors import UserError
from megatron_ext.training.records import METRICS, lr_at

FIELD = "run.branch_from"
EXAMPLE = "give one like runs/trunk/checkpoints/step_400"


@dataclass(frozen=True)
class Branch:
    """Where a run begins.

    Attributes:
        run: folder of the other run.
        checkpoints: the other run's.
        step: of the checkpoint.
    """

    run: Path
    checkpoints: CheckpointFolder
    step: int

    def check_rate(self, lr: float, *, is_allowed: bool = False) -> None:
        """Whether the other run had, at its step, the learning rate that this run's schedule has there.

        Configurations are compared by `Continuing`; this holds the other run's records against them.

        Args:
            lr: this run's learning rate at the step.
            is_allowed: whether another rate is.

        Raises:
            UserError: it had another: no run from the start would have come there.
        """
        found = lr_at(self.run, self.step)
        if found is None:
            mend = "bring it back: the branch's own records begin with it"
            raise UserError(str(self.run / METRICS), f"has no step {self.step}", mend)
        if not is_allowed and not math.isclose(found, lr, rel_tol=1e-9):
            problem = f"had the learning rate {found:.6g} at step {self.step}, where this run's is {lr:.6g}"
            mend = "branch off before the rate falls, from a run with the same rate, warm-up and schedule (wsd)"
            raise UserError(FIELD, f"{self.run} {problem}", mend)


def branch_of(checkpoint: str, steps: int) -> Branch:
    """The checkpoint that a run of `steps` steps is to begin from.

    Raises:
        UserError: there is no such checkpoint, it holds a model alone, or is not before the run's end.
    """
    path = Path(checkpoint)
    checkpoints = CheckpointFolder(path.parent)
    step = next((step for step in checkpoints.steps() if checkpoints.path(step) == path), None)
    if step is None:
        raise UserError(FIELD, f"{path} is no checkpoint of a run", EXAMPLE)
    if checkpoints.is_model_only(step):
        raise UserError(FIELD, f"{path} holds a converted model alone, without optimizer state", EXAMPLE)
    if step >= steps:
        problem = f"{path} is not before the run's end, training.steps {steps}"
        raise UserError(FIELD, problem, "give an earlier checkpoint, or more steps")
    return Branch(path.parent.parent, checkpoints, step)
