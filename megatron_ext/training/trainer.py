"""One optimizer step and one forward pass, under every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_ext.data.batches import Batch
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


class Trainer:
    """Runs Megatron's schedule over this rank's model chunks.

    Args:
        optimizer: owns the wrapped chunks.
        groups: process groups.
        platform: where this runs.
        seq_length: tokens a sample, whole.
        micro_batch_size: samples a forward pass.
    """

    def __init__(
        self,
        optimizer: RunOptimizer,
        groups: ProcessGroupCollection,
        platform: Platform,
        seq_length: int,
        micro_batch_size: int,
    ) -> None:
        self.optimizer, self.groups, self.platform = optimizer, groups, platform
        self._seq_length, self._micro_batch_size = seq_length, micro_batch_size

    @property
    def on_last_stage(self) -> bool:
        """Whether this rank computes losses."""
        return self.groups.pp.rank() == self.groups.pp.size() - 1

    def train_step(self, batches: Sequence[Batch]) -> StepResult:
        """One optimizer step over this rank's micro-batches, of which every rank has as many."""
        self.optimizer.begin_step()
        reports = self._run(batches, _summed_loss, forward_only=False)
        grad_norm = self.optimizer.finish_step()
        none = torch.zeros(2, device=self.platform.device)
        loss, tokens = self.reduce(sum((r["loss_and_tokens"] for r in reports), start=none))
        return StepResult(float(loss / tokens), int(tokens), grad_norm, self.optimizer.lr)

    @torch.no_grad()
    def losses(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Losses [b, t/cp], fp32, of each micro-batch, without gradients; empty but on the last stage."""
        for chunk in self.optimizer.chunks:
            chunk.eval()
        reports = self._run(batches, _kept_loss, forward_only=True)
        for chunk in self.optimizer.chunks:
            chunk.train()
        return [r["losses_bt"] for r in reports]

    def _run(
        self, batches: Sequence[Batch], loss: Callable[..., Any], *, forward_only: bool
    ) -> list[dict[str, Tensor]]:
        chunks = list(self.optimizer.chunks)
        on_device = [batch.to(self.platform.device) for batch in batches]
        iterators = [iter(on_device) for _ in chunks]
        several = len(chunks) > 1
        reports: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, loss),
            data_iterator=iterators if several else iterators[0],
            model=chunks if several else chunks[0],
            num_microbatches=len(batches),
            seq_length=self._seq_length,
            micro_batch_size=self._micro_batch_size,
            forward_only=forward_only,
        )
        return reports if self.on_last_stage else []

    def reduce(self, sums: Tensor) -> Tensor:
        """Sum over all data, in float64, known on every rank; only the last stage's values count."""
        total = sums.to(self.platform.device, torch.float64)
        dist.all_reduce(total, group=self.groups.dp_cp)
        last = dist.get_process_group_ranks(self.groups.pp)[-1]
        dist.broadcast(total, src=last, group=self.groups.pp)
        return total.cpu()


def _forward_step(loss: Callable[..., Any], batches: Iterator[Batch], model: torch.nn.Module) -> tuple[Tensor, Any]:
    batch = next(batches)
    output = model(batch.tokens, batch.position_ids, attention_mask=None, labels=batch.labels)
    return output, partial(loss, batch)


def _summed_loss(batch: Batch, losses_bt: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum and its count travel together; Megatron divides the gradient by the count of the whole batch."""
    total = (losses_bt.float() * batch.loss_mask).sum()
    tokens = batch.loss_mask.sum()
    # It stays on the device: to fetch it here would let the GPU run dry in every micro-batch.
    return total, tokens.to(torch.int), {"loss_and_tokens": torch.stack([total.detach(), tokens])}


def _kept_loss(batch: Batch, losses_bt: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    tokens = batch.loss_mask.sum().to(torch.int)
    return losses_bt.sum(), tokens, {"losses_bt": losses_bt.float().cpu()}
