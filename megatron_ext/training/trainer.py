"""One optimizer step, under every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_ext.data.batches import Batch
from megatron_ext.evaluation.token_losses import TokenLosses
from megatron_ext.optim.base import RunOptimizer
from megatron_ext.platform import Platform
from megatron_ext.training.guard import Fault
from megatron_ext.training.unsound_gradients import watched_gradients

Judge = Callable[[float, float], Fault | None]


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step was.

    Attributes:
        loss: nats a predicted token, over the whole batch, before the update.
        tokens: tokens of the whole batch that were read.
        predicted: labels of the whole batch that count; see `Batch.loss_mask`.
        grad_norm: global norm of the gradient, before clipping.
        lr: learning rate of the update.
        fault: why there was no update; None: there was one.
        is_sound_here: whether the losses of this rank's own micro-batches are finite.
        unsound_gradient: parameter whose gradient of this rank's own micro-batches was the first that was not finite;
            None: there was none, or nobody looked.
    """

    loss: float
    tokens: int
    predicted: int
    grad_norm: float
    lr: float
    fault: Fault | None
    is_sound_here: bool
    unsound_gradient: str | None = None


class Trainer(TokenLosses):
    """Runs Megatron's schedule over this rank's model chunks, for losses alone or to learn from them.

    Args:
        optimizer: owns the wrapped chunks.
        groups: process groups.
        platform: where this runs.
        seq_length: tokens a sample, whole.
        micro_batch_size: samples a forward pass.
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
        """One optimizer step over this rank's micro-batches, of which every rank has as many.

        Args:
            batches: of this rank.
            judge: says of the step's loss and gradient norm what is wrong with them, on all ranks alike; then nothing
                is updated. None: every step is right.
            watched: whether to look for gradients that are not finite, which takes time; see `watched_gradients`.
        """
        self.optimizer.begin_step()
        unsound_gradient = None
        if watched:
            with watched_gradients(self.optimizer.chunks) as first_unsound:
                reports = self.run(batches, summed_loss, forward_only=False)
            unsound_gradient = first_unsound()
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
        return replace(result, lr=self.optimizer.lr, unsound_gradient=unsound_gradient)


def summed_loss(batch: Batch, losses_bt: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum and its count travel together; Megatron divides the gradient by the count of the whole batch."""
    total = (losses_bt.float() * batch.loss_mask).sum()
    tokens = batch.loss_mask.sum()
    # It stays on the device: to fetch it here would let the GPU run dry in every micro-batch.
    return total, tokens.to(torch.int), {"loss_and_tokens": torch.stack([total.detach(), tokens])}
