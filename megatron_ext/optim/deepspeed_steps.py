"""A step of DeepSpeed's optimizers that asks, once the gradient's norm is known, whether it is to go on.

Theirs takes the norm and updates, or, for overflow, decides by itself that it does not. What a run does with a gradient
that is not finite is for the run to say, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

_INVALID = -1.0
"""What DeepSpeed puts for a norm that is not finite; it drops the gradients then."""


def step_if(zero: Any, step: Callable[[], object], goes_on: Callable[[float], bool]) -> None:
    """Make a step of an optimizer, or drop its gradients.

    Args:
        zero: DeepSpeed's optimizer, at any stage.
        step: makes its step; what drives the optimizer may have something to do around it.
        goes_on: whether to update, by the gradient's norm over all ranks, before clipping; inf if it is not finite.
    """
    if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        of_groups = zero._get_norm_groups

        def norms(*arguments: Any, **named: Any) -> list[Any]:
            found = of_groups(*arguments, **named)
            goes = goes_on(float(combine_grad_norm_groups(found)) / float(zero.loss_scale))
            return found if goes else [torch.tensor(_INVALID)]

        with _instead(zero, _get_norm_groups=norms):
            step()
        return
    scaled = zero.scaled_global_norm

    def norm(*arguments: Any, **named: Any) -> Any:
        found = scaled(*arguments, **named)
        return found if goes_on(float(found) / float(zero.loss_scale)) else torch.tensor(_INVALID)

    # It heeds the norm if it is to look for overflow, and would look for it in the gradients, too.
    with _instead(zero, scaled_global_norm=norm, check_grad_overflow=True, check_overflow=lambda *_, **__: None):
        step()


@contextmanager
def _instead(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within it attributes of an object are others."""
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(owner)[name]
        vars(owner).update(own)
