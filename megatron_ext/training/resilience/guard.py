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
        kind: selects the field `resilience.on_...` that gives the action.
        problem: message.
    """

    kind: Literal["nonfinite", "spike"]
    problem: str


class StepGuard:
    """Detect faulty steps from their own values and from the steps before.

    Args:
        config: thresholds.
        history: loss and gradient norm of the steps before, the newest last.
    """

    def __init__(self, config: ResilienceConfig, history: Iterable[tuple[float, float]] = ()) -> None:
        self._config = config
        self.remember(history)

    def remember(self, history: Iterable[tuple[float, float]]) -> None:
        """Replace the steps that later ones are compared with."""
        self._window = deque(history, maxlen=self._config.spike_window)

    def judge(self, loss: float, grad_norm: float) -> Fault | None:
        """Return the fault of a step; None: there is none.

        Args:
            loss: mean over the whole batch, in nats per token.
            grad_norm: global gradient norm before clipping.
        """
        values = {LOSS: loss, NORM: grad_norm}
        for name, value in values.items():
            if not math.isfinite(value):
                return Fault("nonfinite", f"the {name} is not finite ({value})")
        if self._config.on_spike == "ignore" or len(self._window) < self._config.spike_window:
            return None
        for (name, value), past in zip(values.items(), zip(*self._window, strict=True), strict=True):
            mean, far = fmean(past), self._config.spike_deviations * pstdev(past)
            if value > mean + far:
                problem = f"the {name} is {value:.4g}, more than {mean + far:.4g}, which {len(past)} steps before allow"
                return Fault("spike", problem)
        return None

    def accept(self, loss: float, grad_norm: float) -> None:
        """Add a step to those that later ones are compared with."""
        self._window.append((loss, grad_norm))
