"""Step of DeepSpeed's optimizers in two calls, between which the run decides whether to update.

DeepSpeed's own step computes the gradient norm and then updates, or decides by itself not to update because of an
overflow. Here, the norm is computed first, with DeepSpeed's functions. DeepSpeed's step then uses this norm instead of
computing one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

_NONFINITE_NORM = -1.0
"""DeepSpeed's value of a norm that is not finite; the step then drops the gradients."""


class DeepSpeedStep:
    """Step of a DeepSpeed optimizer at any ZeRO stage.

    Args:
        zero: DeepSpeed's optimizer.
        engine: DeepSpeed's engine that drives the optimizer; None without an engine.
    """

    def __init__(self, zero: Any, engine: Any = None) -> None:
        self._zero, self._engine = zero, engine
        self._is_stage_3 = isinstance(zero, DeepSpeedZeroOptimizer_Stage3)
        self._norm: Any = None
        """Norm of the gradients times the loss scale: a tensor, or at stage 3 a list of one per parameter group."""

    def compute_grad_norm(self) -> float:
        """Return the gradient norm over all ranks before clipping; inf if it is not finite."""
        if self._engine is not None:
            self._zero.finalize_gradient_accumulation_boundary()  # the engine's step would do this first
        if self._is_stage_3:
            self._norm = self._zero._get_norm_groups()
            norm = combine_grad_norm_groups(self._norm)
        else:
            self._zero._wait_for_offload_copies()
            self._norm = norm = self._zero.scaled_global_norm()
        return float(norm) / float(self._zero.loss_scale)

    def update(self) -> None:
        """Clip the gradients by the computed norm and update the parameters."""
        self._step_with(self._norm)

    def drop_gradients(self) -> None:
        """Release the gradients without an update."""
        nonfinite_norm = torch.tensor(_NONFINITE_NORM)
        self._step_with([nonfinite_norm] if self._is_stage_3 else nonfinite_norm)

    def _step_with(self, norm: Any) -> None:
        self._norm = None
        if self._is_stage_3:
            replacements: dict[str, Any] = {"_get_norm_groups": lambda: norm}
        else:
            # DeepSpeed uses the norm only if it checks for overflow. It would then also check the gradients.
            replacements = {
                "compute_grad_norm": True,  # a user's DeepSpeed file may disable it
                "scaled_global_norm": lambda: norm,
                "check_grad_overflow": True,
                "check_overflow": lambda *_, **__: None,
            }
        if self._engine is not None:
            replacements["finalize_gradient_accumulation_boundary"] = lambda: None
        with _replace_attributes(self._zero, **replacements):
            (self._zero if self._engine is None else self._engine).step()


@contextmanager
def _replace_attributes(target: Any, **attributes: Any) -> Iterator[None]:
    """Context manager that temporarily replaces attributes of an object."""
    previous = {name: vars(target)[name] for name in attributes if name in vars(target)}
    vars(target).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(target)[name]
        vars(target).update(previous)
