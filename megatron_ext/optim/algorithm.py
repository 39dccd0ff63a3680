"""Base class of an optimizer algorithm: the update rule, independent of how the state is sharded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_ext.config.schema import OptimizerConfig


class Algorithm(ABC):
    """Optimizer algorithm. It is registered by `registry.register` and selected by `optimizer.name`.

    The update must be elementwise in each parameter, because sharded optimizers update slices of a flattened parameter.

    Attributes:
        moments: names of the state tensors in `torch.optim.Optimizer.state`. Each tensor has the parameter's shape and
            is saved in checkpoints.
        shardings: values of `optimizer.sharding` that the algorithm supports. Megatron's distributed optimizer accepts
            only Adam.
    """

    moments: ClassVar[tuple[str, ...]]
    shardings: ClassVar[tuple[str, ...]] = ("none", "zero1", "zero2", "zero3")

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
        """Build the torch optimizer.

        Args:
            groups: parameter groups. The learning-rate schedule sets `lr` and `weight_decay` of each group before every
                step.
            config: settings of the optimizer.
        """

    def init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before the first step: fp32 zeros of its shape for each of `moments`.

        A checkpoint may be loaded into this state. The first step must accept it in place of a missing state.
        """
        return {name: torch.zeros_like(parameter) for name in self.moments}

    def megatron_fields(self, config: OptimizerConfig) -> dict[str, Any] | None:
        """Return the fields of Megatron's configuration if Megatron builds the optimizer; None to use `build`."""
        return None
