"""Forward and backward passes of batches, and their per-token losses, under any parallel layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_ext.data.batches import Batch
from megatron_ext.model.pipeline_schedule import evaluation_mode, run_schedule
from megatron_ext.platform.device import Platform


class TokenLosses:
    """Forward passes over this rank's model chunks.

    Args:
        chunks: model chunks of this rank.
        groups: process groups.
        platform: device and backend.
        seq_length: tokens of a whole sample, before it is divided over context-parallel ranks.
        micro_batch_size: samples per forward pass.
        reset_attention: mask attention across the documents of a sample and reset states. The batches must have
            `cu_seqlens`.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        groups: ProcessGroupCollection,
        platform: Platform,
        seq_length: int,
        micro_batch_size: int,
        *,
        reset_attention: bool = False,
    ) -> None:
        self._reset_attention = reset_attention
        self.chunks, self.groups, self.platform = list(chunks), groups, platform
        self._seq_length, self._micro_batch_size = seq_length, micro_batch_size

    @property
    def on_last_stage(self) -> bool:
        """True on the last pipeline stage, which computes the losses."""
        return self.groups.pp.rank() == self.groups.pp.size() - 1

    def losses(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the losses [b, t/cp], fp32 on the CPU, of each micro-batch; empty except on the last stage.

        The forward passes run without gradients.
        """
        with evaluation_mode(self.chunks):
            return [report["losses_bt"] for report in self.run(batches, _unreduced_loss, forward_only=True)]

    def reduce(self, sums: Tensor) -> Tensor:
        """Sum over the data- and context-parallel group, in float64 on the CPU; every rank gets the result.

        Only the values of the last pipeline stage are used.
        """
        total = sums.to(self.platform.device, torch.float64)
        dist.all_reduce(total, group=self.groups.dp_cp)
        last = dist.get_process_group_ranks(self.groups.pp)[-1]
        dist.broadcast(total, src=last, group=self.groups.pp)
        return total.cpu()

    def run(self, batches: Sequence[Batch], loss: Callable[..., Any], *, forward_only: bool) -> list[dict[str, Tensor]]:
        """Run the pipeline schedule.

        Returns:
            The report of `loss` for each micro-batch; empty except on the last pipeline stage.
        """
        reports: list[dict[str, Tensor]] = run_schedule(
            partial(_forward_step, loss, self._reset_attention),
            self.chunks,
            [batch.to(self.platform.device) for batch in batches],
            seq_length=self._seq_length,
            micro_batch_size=self._micro_batch_size,
            forward_only=forward_only,
        )
        return reports if self.on_last_stage else []


def _forward_step(
    loss: Callable[..., Any], reset_attention: bool, batches: Iterator[Batch], model: torch.nn.Module
) -> tuple[Tensor, Any]:
    batch = next(batches)
    documents = {"packed_seq_params": make_packed_seq_params(batch.cu_seqlens)} if reset_attention else {}
    targets = {"labels": batch.labels, "loss_mask": batch.loss_mask}
    output = model(batch.tokens, batch.position_ids, attention_mask=None, **targets, **documents)
    return output, partial(loss, batch)


def make_packed_seq_params(cu_seqlens: Tensor | None) -> PackedSeqParams:
    """Return document boundaries as Megatron's `PackedSeqParams`, which Megatron passes to each mixer.

    Args:
        cu_seqlens: `Batch.cu_seqlens` of whole samples.
    """
    assert cu_seqlens is not None, "batches without bounds of documents"
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)


def _unreduced_loss(batch: Batch, losses_bt: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    tokens = batch.loss_mask.sum().to(torch.int)
    return losses_bt.sum(), tokens, {"losses_bt": losses_bt.float().cpu()}


def summed_loss(batch: Batch, losses_bt: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return a micro-batch's summed loss, its number of labels, and both as a tensor to report.

    Megatron divides the gradient by the number of labels of the whole batch.

    Args:
        batch: micro-batch of this rank.
        losses_bt: loss of each token in nats, (batch, tokens).
    """
    total = (losses_bt.float() * batch.loss_mask).sum()
    tokens = batch.loss_mask.sum()
    # No copy to the host here: it would stall the GPU in every micro-batch.
    return total, tokens.to(torch.int), {"loss_and_tokens": torch.stack([total.detach(), tokens])}
