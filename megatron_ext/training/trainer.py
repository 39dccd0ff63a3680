"""Forward, backward and optimizer step, under every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.data.batches import Batch
from megatron_ext.model.forward_backward import TokenLosses, summed_loss
from megatron_ext.optim.base import RunOptimizer
from megatron_ext.platform.device import Platform
from megatron_ext.training.resilience.guard import Fault
from megatron_ext.training.resilience.nonfinite_gradients import watched_gradients

Judge = Callable[[float, float], Fault | None]


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step.

    Attributes:
        loss: mean over the whole batch before the update, in nats per predicted token.
        tokens: input tokens of the whole batch.
        predicted: labels of the whole batch that count; see `Batch.loss_mask`.
        grad_norm: global norm of the gradient, before clipping.
        lr: learning rate of the update.
        fault: why there was no update; None: there was one.
        is_sound_here: False if the step is faulty and the loss of this rank's own micro-batches is not finite.
        nonfinite_gradient: parameter with the first non-finite gradient of this rank's own micro-batches; None: there
            was none, or gradients were not checked.
    """

    loss: float
    tokens: int
    predicted: int
    grad_norm: float
    lr: float
    fault: Fault | None
    is_sound_here: bool
    nonfinite_gradient: str | None = None


class Trainer(TokenLosses):
    """Run Megatron's pipeline schedule over this rank's model chunks, forward only or with an optimizer step.

    Args:
        optimizer: owns the wrapped chunks.
        groups: process groups.
        platform: of this process.
        seq_length: tokens per sample, before it is split over context-parallel ranks.
        micro_batch_size: samples per forward pass.
        reset_attention: see `TokenLosses`.
    """

    def __init__(
        self,
        optimizer: RunOptimizer,
        groups: ProcessGroupCollection,
        platform: Platform,
        seq_length: int,
        micro_batch_size: int,
        *,
        reset_attention: bool = False,
    ) -> None:
        sizes = seq_length, micro_batch_size
        super().__init__(optimizer.chunks, groups, platform, *sizes, reset_attention=reset_attention)
        self.optimizer = optimizer

    def train_step(self, batches: Sequence[Batch], judge: Judge | None = None, watched: bool = False) -> StepResult:
        """Do one optimizer step over this rank's micro-batches, of which every rank has the same number.

        Args:
            batches: of this rank.
            judge: returns the fault for the step's loss and gradient norm, the same on all ranks. If there is a
                fault, nothing is updated. None: no step is faulty.
            watched: look for non-finite gradients, which takes time; see `watched_gradients`.
        """
        self.optimizer.begin_step()
        nonfinite_gradient = None
        if watched:
            with watched_gradients(self.optimizer.chunks) as first_unsound:
                reports = self.run(batches, summed_loss, forward_only=False)
            nonfinite_gradient = first_unsound()
        else:
            reports = self.run(batches, summed_loss, forward_only=False)
        none = torch.zeros(2, device=self.platform.device)
        here = sum((r["loss_and_tokens"] for r in reports), start=none)
        tokens = len(batches) * self.groups.dp.size() * self._micro_batch_size * self._seq_length
        found: list[StepResult] = []

        def goes_on(grad_norm: float) -> bool:
            loss, predicted = self.reduce(here)
            mean = float(loss / predicted)
            fault = None if judge is None else judge(mean, grad_norm)
            is_sound_here = fault is None or bool(here.isfinite().all())
            found.append(StepResult(mean, tokens, int(predicted), grad_norm, 0.0, fault, is_sound_here))
            return fault is None

        self.optimizer.finish_step(goes_on)
        (result,) = found
        return replace(result, lr=self.optimizer.lr, nonfinite_gradient=nonfinite_gradient)
