"""Step of DeepSpeed's optimizers with a decision by the caller after the gradient norm is known.

DeepSpeed's own step computes the norm and updates, or decides itself not to update because of overflow. Here the run
decides on a gradient that is not finite, before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

_INVALID = -1.0
"""DeepSpeed's value of a norm that is not finite; the step then drops the gradients."""


def step_if(zero: Any, step: Callable[[], object], goes_on: Callable[[float], bool]) -> None:
    """Run a step of an optimizer, or drop its gradients.

    Args:
        zero: DeepSpeed's optimizer, at any stage.
        step: runs the step; may be that of a wrapper of the optimizer, such as the engine.
        goes_on: returns whether to update, given the gradient norm over all ranks before clipping; inf if it is not
            finite.
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

    # It uses the norm only if it checks for overflow, and would then also check the gradients.
    with _instead(zero, scaled_global_norm=norm, check_grad_overflow=True, check_overflow=lambda *_, **__: None):
        step()


@contextmanager
def _instead(owner: Any, **attributes: Any) -> Iterator[None]:
    """Context manager that temporarily replaces attributes of an object."""
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(owner)[name]
        vars(owner).update(own)
