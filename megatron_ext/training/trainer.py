"""Forward, backward and optimizer step, under every layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.data.batches import Batch
from megatron_ext.model.forward_backward import TokenLosses, summed_loss
from megatron_ext.optim.base import RunOptimizer
from megatron_ext.platform.device import Platform
from megatron_ext.training.resilience.guard import Fault
from megatron_ext.training.resilience.nonfinite_gradients import checked_gradients


@dataclass(frozen=True)
class StepResult:
    """Values of a step, known before the update.

    Attributes:
        loss: mean over the global batch, in nats per predicted token.
        tokens: number of input tokens of the global batch.
        predicted: number of labels of the global batch that count; see `Batch.loss_mask`.
        grad_norm: global norm of the gradient, before clipping.
        is_local_loss_finite: False if the loss of this rank's own micro-batches is not finite.
        nonfinite_gradient: name of the parameter with the first non-finite gradient of this rank's own micro-batches;
            None if all are finite, or if gradients were not checked.
        fault: reason why the parameters are not updated; None if they are.
    """

    loss: float
    tokens: int
    predicted: int
    grad_norm: float
    is_local_loss_finite: bool
    nonfinite_gradient: str | None = None
    fault: Fault | None = None


class Trainer(TokenLosses):
    """Run Megatron's pipeline schedule over this rank's model chunks, forward only or with an optimizer step.

    Args:
        optimizer: optimizer, which owns the wrapped model chunks.
        groups: process groups.
        platform: platform of this process.
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

    def compute_gradients(self, batches: Sequence[Batch], check_gradients: bool = False) -> StepResult:
        """Compute loss, gradients and gradient norm of a step; a collective call.

        Call `optimizer.step` or `optimizer.drop_gradients` afterwards, with the same choice on every rank.

        Args:
            batches: micro-batches of this rank. Their number must be equal on all ranks.
            check_gradients: True to look for non-finite gradients, which takes time; see `checked_gradients`.
        """
        self.optimizer.begin_step()
        nonfinite_gradient = None
        if check_gradients:
            with checked_gradients(self.optimizer.chunks) as first_nonfinite:
                reports = self.run(batches, summed_loss, forward_only=False)
            nonfinite_gradient = first_nonfinite()
        else:
            reports = self.run(batches, summed_loss, forward_only=False)
        grad_norm = self.optimizer.compute_grad_norm()
        zeros = torch.zeros(2, device=self.platform.device)
        local = sum((r["loss_and_tokens"] for r in reports), start=zeros)
        loss, predicted = self.reduce(local)
        mean = float(loss / predicted)
        is_local_loss_finite = math.isfinite(mean) or bool(local.isfinite().all())
        tokens = len(batches) * self.groups.dp.size() * self._micro_batch_size * self._seq_length
        return StepResult(mean, tokens, int(predicted), grad_norm, is_local_loss_finite, nonfinite_gradient)

    def train_step(self, batches: Sequence[Batch]) -> StepResult:
        """Do one optimizer step without checking loss and gradient norm; see `compute_gradients`."""
        result = self.compute_gradients(batches)
        self.optimizer.step()
        return result
