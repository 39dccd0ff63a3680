"""Detection of non-finite values and spikes in loss and gradient norm, before the parameters are updated."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Literal

from megatron_ext.config.schema import ResilienceConfig

LOSS, NORM = "loss", "gradient's norm"


@dataclass(frozen=True)
class Fault:
    """Fault of a step.

    Attributes:
        kind: kind of fault; `resilience.on_<kind>` gives the action.
        problem: message that describes the fault.
    """

    kind: Literal["nonfinite", "spike"]
    problem: str


class StepGuard:
    """Detect faulty steps from their loss and gradient norm, compared with those of previous steps.

    Args:
        config: thresholds.
        history: loss and gradient norm of previous steps, the newest last.
    """

    def __init__(self, config: ResilienceConfig, history: Iterable[tuple[float, float]] = ()) -> None:
        self._config = config
        self.replace_history(history)

    def replace_history(self, history: Iterable[tuple[float, float]]) -> None:
        """Replace the history with which steps are compared."""
        self._window = deque(history, maxlen=self._config.spike_window)

    def find_fault(self, loss: float, grad_norm: float) -> Fault | None:
        """Return the fault of a step, or None.

        Args:
            loss: mean over the global batch, in nats per token.
            grad_norm: global gradient norm before clipping.
        """
        values = {LOSS: loss, NORM: grad_norm}
        for name, value in values.items():
            if not math.isfinite(value):
                return Fault("nonfinite", f"the {name} is not finite ({value})")
        if self._config.on_spike == "ignore" or len(self._window) < self._config.spike_window:
            return None
        for (name, value), previous_values in zip(values.items(), zip(*self._window, strict=True), strict=True):
            mean, margin = fmean(previous_values), self._config.spike_deviations * pstdev(previous_values)
            if value > mean + margin:
                limit = f"{mean + margin:.4g}, the limit from the previous {len(previous_values)} steps"
                problem = f"the {name} is {value:.4g}, more than {limit}"
                return Fault("spike", problem)
        return None

    def accept(self, loss: float, grad_norm: float) -> None:
        """Add a step to the history with which later steps are compared."""
        self._window.append((loss, grad_norm))
