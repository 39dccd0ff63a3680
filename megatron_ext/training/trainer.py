"""One optimizer step, under every layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_ext.data.batches import Batch
from megatron_ext.evaluation.token_losses import TokenLosses
from megatron_ext.optim.base import RunOptimizer
from megatron_ext.platform import Platform


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step was.

    Attributes:
        loss: nats a token, over the tokens of the whole batch, before the update.
        tokens: real tokens of the whole batch.
        grad_norm: global norm of the gradient, before clipping.
        lr: learning rate of the update.
    """

    loss: float
    tokens: int
    grad_norm: float
    lr: float


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

    def train_step(self, batches: Sequence[Batch]) -> StepResult:
        """One optimizer step over this rank's micro-batches, of which every rank has as many."""
        self.optimizer.begin_step()
        reports = self._run(batches, _summed_loss, forward_only=False)
        grad_norm = self.optimizer.finish_step()
        none = torch.zeros(2, device=self.platform.device)
        loss, tokens = self.reduce(sum((r["loss_and_tokens"] for r in reports), start=none))
        return StepResult(float(loss / tokens), int(tokens), grad_norm, self.optimizer.lr)


def _summed_loss(batch: Batch, losses_bt: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum and its count travel together; Megatron divides the gradient by the count of the whole batch."""
    total = (losses_bt.float() * batch.loss_mask).sum()
    tokens = batch.loss_mask.sum()
    # It stays on the device: to fetch it here would let the GPU run dry in every micro-batch.
    return total, tokens.to(torch.int), {"loss_and_tokens": torch.stack([total.detach(), tokens])}
